"""The command as a whole: report, resume, comparison, several turns, and bad input that gets one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.errors import CorruptError, PreflightError, SpecMismatchError
from headrace.evaluate.config import EvaluateConfig
from headrace.evaluate.decode import Answer
from headrace.evaluate.offline import compare, draft_name
from headrace.evaluate.run import evaluate

from .conftest import random_prompts, some_prompts


def silent(text: str) -> None: ...


@pytest.fixture(scope="module")
def prompt_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("prompts")
    sets = {"known": some_prompts()[:4], "other": random_prompts([4, 7, 3], seed=9)}
    for name, rows in sets.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in rows))
    return [folder / f"{name}.jsonl" for name in sets]


def settings(
    tiny: Callable[..., Path], drafts: list[Path], prompts: list[Path], **more: Any
) -> EvaluateConfig:
    return EvaluateConfig(
        **{
            "drafts": drafts,
            "model": str(tiny()),
            "prompts": prompts,
            "max_new_tokens": 24,
            "steps": 3,
            **more,
        }
    )


@pytest.mark.slow
def test_report_resume_and_comparison(
    tiny: Callable[..., Path], tiny_draft: Callable[..., Path], prompt_files: list[Path], tmp_path: Path
) -> None:
    drafts = [tiny_draft("llama", 80), tiny_draft("llama")]
    config = settings(tiny, drafts, prompt_files, out=tmp_path / "report", batch_size=3)
    report = evaluate(config, silent)
    assert json.loads((tmp_path / "report" / "manifest.json").read_text()) == report
    assert [d["name"] for d in report["drafts"]] == ["llama-80", "llama-0"]
    assert report["output_ok"] is True
    assert report["answers"] == 2 * 7
    for draft in report["drafts"]:
        known, other = draft["parts"]
        assert (known["set"], other["set"]) == ("known", "other")
        assert known["equal"] == known["checked"] == known["answers"] == 4
        assert draft["all"]["verifications"] == known["verifications"] + other["verifications"]
        assert draft["all"]["reached"] == [
            a + b for a, b in zip(known["reached"], other["reached"], strict=True)
        ]
        for part in (known, other):
            assert part["acceptance_length"] == pytest.approx(
                1 + part["accepted"] / part["verifications"], abs=1e-4
            )
            assert part["seconds"] > 0 and part["plain_seconds"] > 0 and part["speedup"] > 0
    assert report["drafts"][0]["weights_hash"] != report["drafts"][1]["weights_hash"]
    assert report["acceptance_length"] == report["drafts"][0]["all"]["acceptance_length"] > 1.2

    # A second run measures nothing again; a changed setting does.
    said: list[str] = []
    again = evaluate(config, said.append)
    assert sum("measured before" in line for line in said) == 4
    assert again["drafts"] == report["drafts"]
    said.clear()
    evaluate(config.model_copy(update={"steps": 2}), said.append)
    assert not any("measured before" in line for line in said)
    # A part that a crash or an editor broke is named.
    broken = next((tmp_path / "report" / "parts").glob("known-*.json"))
    for file in (tmp_path / "report" / "parts").glob("*.json"):
        file.write_text('{"set_name": 1, "foreign": 2}')
    with pytest.raises(CorruptError, match=r"is not a part of an evaluation.*delete it"):
        evaluate(config, silent)
    assert broken.exists()


@pytest.mark.slow
def test_batch_size_and_order_change_nothing_but_time(
    tiny: Callable[..., Path], tiny_draft: Callable[..., Path], prompt_files: list[Path]
) -> None:
    reports = [
        evaluate(settings(tiny, [tiny_draft("llama", 80)], prompt_files, batch_size=size), silent)["drafts"][
            0
        ]["all"]
        for size in (1, 8)
    ]
    assert reports[0]["reached"] == reports[1]["reached"]


@pytest.mark.slow
def test_trees_and_sampling_run_through_the_command(
    tiny: Callable[..., Path], tiny_draft: Callable[..., Path], prompt_files: list[Path]
) -> None:
    draft = [tiny_draft("llama", 80)]
    chain = evaluate(settings(tiny, draft, prompt_files[:1], steps=3), silent)
    tree = evaluate(settings(tiny, draft, prompt_files[:1], steps=3, topk=3, tree_tokens=12), silent)
    assert tree["verify_tokens"] == 12
    assert tree["output_ok"] and tree["drafts"][0]["all"]["equal"] == 4
    assert tree["acceptance_length"] >= chain["acceptance_length"]
    for proposals in ("argmax", "sampled"):
        more = {"temperature": 0.7, "top_p": 0.9, "proposals": proposals, "seed": 3}
        first, second = (evaluate(settings(tiny, draft, prompt_files[:1], **more), silent) for _ in range(2))
        assert first["drafts"][0]["all"]["reached"] == second["drafts"][0]["all"]["reached"]
        assert first["drafts"][0]["parts"][0]["checked"] == 0


@pytest.mark.slow
def test_turns_answers_and_the_printed_table(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A target with a real tokenizer and template; the second turn's prompt holds the first answer."""
    import torch

    from headrace.draft.checkpoint import save_draft
    from headrace.target import Target
    from headrace.testing.drafts import new_draft

    target = Target.open(str(tiny_llama))
    torch.manual_seed(0)
    draft = new_draft(target, (1, 2, 3), torch.arange(4096))
    save_draft(tmp_path / "draft", draft, target.spec([1, 2, 3]), {})
    prompts = tmp_path / "talk.jsonl"
    prompts.write_text(
        json.dumps({"turns": ["Say something.", "Say more."]}) + "\n" + json.dumps({"prompt": "Hello"})
    )
    command = ["evaluate", str(tmp_path / "draft"), "--model", str(tiny_llama), "--prompts", str(prompts)]
    assert main([*command, "--max-new-tokens", "8", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "acceptance length" in printed and "3/3" in printed
    assert (tmp_path / "out" / "acceptance.png").stat().st_size > 10_000
    part = json.loads(next((tmp_path / "out" / "parts").glob("*.json")).read_text())
    records = {(r["line"], r["turn"]): r for r in part["records"]}
    assert sorted(records) == [(1, 1), (1, 2), (2, 1)]
    # The second prompt holds the first prompt, the answer, and a user turn.
    first, second = records[1, 1], records[1, 2]
    assert second["prompt_tokens"] > first["prompt_tokens"] + len("Say more.".split())
    assert main([*command, "--max-new-tokens", "8", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["ok"] is True and value["answers"] == 3


@pytest.mark.slow
def test_wrong_output_fails_the_command(
    tiny: Callable[..., Path],
    tiny_draft: Callable[..., Path],
    prompt_files: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A target whose verification is wrong by one position: what the check against plain decoding is for."""
    from headrace.evaluate.verifier import Verifier

    right = Verifier.verify

    def shifted(self: Verifier, tokens: Any, ancestors: Any, depths: Any) -> Any:
        return right(self, tokens, ancestors, depths + (1 if tokens.shape[1] > 1 else 0))

    monkeypatch.setattr(Verifier, "verify", shifted)
    command = [
        "evaluate",
        str(tiny_draft("llama", 80)),
        "--model",
        str(tiny()),
        "--prompts",
        str(prompt_files[0]),
        "--json",
    ]
    assert main(command) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["output_ok"] is False
    assert "not the target's own greedy output" in value["error"]["message"]


def test_prompts_too_long_are_counted_and_all_of_them_is_an_error(
    tiny: Callable[..., Path], tiny_draft: Callable[..., Path], prompt_files: list[Path], tmp_path: Path
) -> None:
    short = tmp_path / "short-target"
    shutil.copytree(tiny(), short)
    config = json.loads((short / "config.json").read_text())
    config["max_position_embeddings"] = 40
    (short / "config.json").write_text(json.dumps(config))
    draft = tmp_path / "draft"
    shutil.copytree(tiny_draft("llama", 80), draft)
    document = json.loads((draft / "config.json").read_text())
    from headrace.target import Target

    document["spec"]["config_hash"] = Target.open(str(short)).config_hash
    (draft / "config.json").write_text(json.dumps(document))
    options = {"drafts": [draft], "model": str(short), "prompts": prompt_files[:1], "steps": 3}
    report = evaluate(EvaluateConfig(**options, max_new_tokens=28), silent)
    part = report["drafts"][0]["parts"][
        0
    ]  # room for prompts of 40 - 28 - 3 - 1 = 8 tokens: lengths are 1, 2, 5, 9
    assert (part["answers"], part["too_long"]) == (3, 1)
    with pytest.raises(
        PreflightError, match=r"every prompt of .*known\.jsonl is too long for the 40 positions"
    ):
        evaluate(EvaluateConfig(**options, max_new_tokens=39), silent)


def test_a_drafter_of_another_target_is_refused(
    tiny: Callable[..., Path], tiny_draft: Callable[..., Path], prompt_files: list[Path]
) -> None:
    config = EvaluateConfig(drafts=[tiny_draft("llama", 80)], model=str(tiny("qwen3")), prompts=prompt_files)
    with pytest.raises(SpecMismatchError, match="made for another target"):
        evaluate(config, silent)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--proposals", "sampled"], "proposals = sampled needs a temperature"),
        (["--tree-tokens", "8"], "give topk above 1"),
        (["--topk", "2", "--tree-tokens", "2"], "cannot hold one path"),
        (["--no-offline"], "there must be a server"),
        (["--server", "localhost:1"], "give an address such as"),
        (["--steps", "0"], "steps"),
    ],
)
def test_bad_options_exit_2(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "draft", "--model", "m", "--prompts", "p.jsonl", *options]) == 2
    assert message in capsys.readouterr().err


def test_missing_things_exit_2(
    tiny: Callable[..., Path], prompt_files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "no-such-draft", "--model", str(tiny()), "--prompts", str(prompt_files[0])]) == 2
    assert "drafter folder no-such-draft does not exist" in capsys.readouterr().err
    assert main(["evaluate", "no-such-draft", "--model", str(tiny()), "--prompts", "none.jsonl"]) == 2
    assert "prompt file none.jsonl does not exist" in capsys.readouterr().err


def test_an_unreachable_server_is_one_sentence(
    tiny: Callable[..., Path],
    tiny_draft: Callable[..., Path],
    prompt_files: list[Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    from headrace.testing.servers import free_port

    command = [
        "evaluate",
        str(tiny_draft("llama", 80)),
        "--model",
        str(tiny()),
        "--prompts",
        str(prompt_files[0]),
    ]
    assert main([*command, "--no-offline", "--server", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_ties_are_told_from_errors() -> None:
    plain = Answer(tokens=[4, 5, 6], gaps=[3.0, 0.1, 2.0])
    assert compare([4, 5, 6], plain, 0.25) == "equal"
    assert compare([4, 9, 1], plain, 0.25) == "tie"
    assert compare([4, 9, 1], plain, 1e-3) == "different"
    assert compare([4, 5, 9], plain, 0.25) == "different"
    assert compare([4, 5], plain, 0.25) == "different"


def test_drafters_are_told_apart_by_the_shortest_name() -> None:
    folders = [Path("/runs/a/best"), Path("/runs/b/best"), Path("/runs/c")]
    assert [draft_name(f, folders) for f in folders] == ["a/best", "b/best", "c"]


def test_configs_are_checked_as_values() -> None:
    with pytest.raises(ValueError, match="a server serves one drafter"):
        EvaluateConfig(drafts=[Path("a"), Path("b")], model="m", prompts=[Path("p")], server="http://x")
    assert (
        EvaluateConfig(drafts=[Path("a")], model="m", prompts=[Path("p")], topk=2, steps=4).verify_tokens == 4
    )
