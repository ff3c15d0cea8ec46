"""Prompt files: the shapes people have, every broken line by its number, conversations that grow by the model's answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InputError
from headrace.evaluate.prompts import Conversation, Prompt, read_prompts, read_sets
from headrace.target import Target


def write(folder: Path, *lines: Any, name: str = "set.jsonl") -> Path:
    path = folder / name
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    )
    return path


def test_every_shape_of_a_line(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"question_id": 0, "category": "math", "turns": ["a", "b", "c"], "reference": ["x"]},
        "",
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "z"},
            ]
        },
        {"prompt": "line\u2028separator"},
        {"input_ids": [5, 6, 7]},
    )
    prompts = read_prompts(file).prompts
    assert [(p.index, p.line, p.turns) for p in prompts] == [(0, 1, 3), (1, 3, 1), (2, 4, 1), (3, 5, 1)]
    assert prompts[0].messages == ({"role": "user", "content": "a"},)
    assert prompts[0].follow_ups == ("b", "c")
    # The recorded answer is not part of the prompt.
    assert [m["role"] for m in prompts[1].messages] == ["system", "user"]
    assert prompts[2].messages[0]["content"] == "line\u2028separator"
    assert prompts[3].ids == (5, 6, 7)
    assert len(read_prompts(file, limit=2)) == 2
    assert read_prompts(file, limit=2).sha != read_prompts(file).sha


@pytest.mark.parametrize(
    "line, message",
    [
        ("{broken", "set.jsonl:2 is not JSON"),
        ("[1]", "set.jsonl:2 is not a JSON object"),
        ({"text": "a"}, "set.jsonl:2 has none of"),
        ({"turns": []}, "set.jsonl:2: turns must be"),
        ({"turns": ["a", 3]}, "set.jsonl:2: turns must be"),
        ({"prompt": ""}, "set.jsonl:2: prompt must be"),
        ({"input_ids": [1, -2]}, "set.jsonl:2: input_ids must be"),
        ({"input_ids": [True]}, "set.jsonl:2: input_ids must be"),
        ({"messages": "hi"}, "set.jsonl:2: messages must be"),
        ({"messages": [{"role": "user"}]}, "set.jsonl:2: message 0 is not"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "unknown role 'bot'"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "nothing but assistant"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_prompts(write(tmp_path, {"prompt": "fine"}, line))


def test_files_that_are_no_prompt_sets(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(InputError, match="holds no prompts"):
        read_prompts(write(tmp_path, "", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(InputError, match="not a UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")
    (tmp_path / "other").mkdir()
    twins = [write(tmp_path, {"prompt": "a"}), write(tmp_path / "other", {"prompt": "a"})]
    with pytest.raises(InputError, match="two prompt files are called set"):
        read_sets(twins)


def test_a_conversation_renders_by_the_template_and_grows_by_answers(smollm2: Path) -> None:
    tokenizer = Target.open(str(smollm2)).tokenizer
    talk = Conversation(Prompt(0, 1, ({"role": "user", "content": "One?"},), ("Two?",)), tokenizer)
    first = talk.ids()
    assert isinstance(first, list)
    text = tokenizer.decode(first)
    assert text.endswith("<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n")
    assert first.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == text.count("<|im_start|>")
    talk.answer(tokenizer.encode("Yes.<|im_end|>"))
    assert not talk.done
    assert tokenizer.decode(talk.ids()).endswith(
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    )
    talk.answer([5])
    assert talk.done
    plain = Conversation(Prompt(0, 1, ({"role": "user", "content": "One?"},)), tokenizer, chat=False)
    assert plain.ids() == tokenizer.encode("One?")


def test_a_template_that_refuses_becomes_a_sentence(smollm2: Path) -> None:
    tokenizer = Target.open(str(smollm2)).tokenizer
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match=r"line 7.*roles must alternate"):
        Conversation(Prompt(0, 7, ({"role": "user", "content": "a"},)), tokenizer).ids()
