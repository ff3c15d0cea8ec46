"""Chat templates written for tests in the styles of the model families: what they do is theirs, the text is ours.

Each :class:`Style` names the tokens its template needs; :func:`styled` gives a real tokenizer these tokens and the
template, so that masks and ids are tested with real merges.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Style:
    """A template and the tokens it stands on."""

    template: str
    special: tuple[str, ...]
    speakable: tuple[str, ...] = ()
    """Added tokens that are not special: servers return them as text."""
    end: str = ""
    """End-of-turn token."""
    begin: str = ""
    """Beginning-of-sequence token the template prints."""


CHATML = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA3 = """
{{- bos_token }}
{%- if date_string is not defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}{%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '\\n\\n' }}
{%- if tools %}{{- 'You can call:\\n' }}{%- for t in tools %}{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for m in rest %}
    {%- if m.role == 'tool' or m.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}{%- for t in tools %}{{- '\\n' + (t | tojson) }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set reasoning = '' %}
        {%- if m.reasoning_content is string %}
            {%- set reasoning = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for c in m.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
            {{- (c.function.arguments if c.function.arguments is string else (c.function.arguments | tojson)) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

DEEPSEEK = """
{{- bos_token }}
{%- set ns = namespace(after_tool=false) %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {{- m.content }}
    {%- elif m.role == 'user' %}
        {%- set ns.after_tool = false %}
        {{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- if not ns.after_tool %}{{- '<｜Assistant｜></think>' }}{%- endif %}
        {%- set ns.after_tool = false %}
        {{- m.content.split('</think>')[-1] }}
        {%- for c in m.tool_calls or [] %}
            {%- if loop.first %}{{- '<｜tool▁calls▁begin｜>' }}{%- endif %}
            {{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}
            {%- if loop.last %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'tool' %}
        {%- set ns.after_tool = true %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.after_tool %}{{- '<｜Assistant｜></think>' }}{%- endif %}
"""

KIMI = """
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{%- endif %}
{%- set ns = namespace(closed=-1) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and not m.tool_calls %}{%- set ns.closed = loop.index0 %}{%- endif %}
{%- endfor %}
{%- set ns.open_from = ns.closed if messages[-1].role == 'assistant' else ns.closed + 1 %}
{%- set back = namespace(i=ns.open_from, stop=false) %}
{%- for n in range(ns.open_from, 0, -1) %}
    {%- if not back.stop and messages[n - 1].role in ['tool', 'assistant'] and messages[n - 1].content is defined
           and (messages[n - 1].role == 'tool' or messages[n - 1].tool_calls) %}
        {%- set back.i = n - 1 %}
    {%- else %}
        {%- set back.stop = true %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_assistant|>assistant<|im_middle|>' }}
        {%- set reasoning = m.reasoning_content or '' %}
        {{- '<think>' + (reasoning if loop.index0 >= back.i else '') + '</think>' + m.content }}
        {%- if m.tool_calls %}
            {{- '<|tool_calls_section_begin|>' }}
            {%- for c in m.tool_calls %}
                {{- '<|tool_call_begin|>' + (c.id or c.function.name) + '<|tool_call_argument_begin|>' }}
                {{- (c.function.arguments if c.function.arguments is string else (c.function.arguments | tojson)) + '<|tool_call_end|>' }}
            {%- endfor %}
            {{- '<|tool_calls_section_end|>' }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {{- '<|im_system|>tool<|im_middle|>## Return of ' + (m.tool_call_id or 'call') + '\\n' + m.content }}
    {%- else %}
        {{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""

HARMONY = """
{{- '<|start|>system<|message|>You are a large language model.\\nCurrent date: ' + strftime_now('%Y-%m-%d') }}
{{- '\\n\\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if messages[0].role in ['system', 'developer'] %}
    {%- set developer = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set developer = '' %}{%- set rest = messages %}
{%- endif %}
{%- if developer or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if developer %}{{- '# Instructions\\n\\n' + developer }}{%- endif %}
    {%- if tools %}{{- '# Tools\\n\\n' + (tools | tojson) }}{%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(tool='', final=false) %}
{%- for m in rest %}
    {%- if m.role == 'assistant' %}
        {%- if m.tool_calls %}
            {%- set ns.final = false %}
            {%- for later in rest[loop.index:] %}{%- if later.role == 'assistant' and not later.tool_calls %}{%- set ns.final = true %}{%- endif %}{%- endfor %}
            {%- if m.thinking and not ns.final %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
            {%- endif %}
            {%- set call = m.tool_calls[0].function %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- (call.arguments | tojson) + '<|call|>' }}
            {%- set ns.tool = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if m.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

GEMMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set lead = messages[0].content + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set lead = '' %}{%- set rest = messages %}
{%- endif %}
{%- for m in rest %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {{- (lead if loop.first else '') + (m.content | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
                   "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")  # fmt: skip
_KIMI_CALLS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
               "<|tool_call_argument_begin|>")  # fmt: skip
_HARMONY_TOKENS = ("<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|call|>", "<|return|>")

STYLES = {
    "chatml": Style(CHATML, _CHATML_TOKENS, end="<|im_end|>"),
    "llama3": Style(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        end="<|eot_id|>",
        begin="<|begin_of_text|>",
    ),
    "qwen3": Style(
        QWEN3,
        _CHATML_TOKENS,
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        end="<|im_end|>",
    ),
    "deepseek": Style(
        DEEPSEEK,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        ("<think>", "</think>", *_DEEPSEEK_CALLS),
        end="<｜end▁of▁sentence｜>",
        begin="<｜begin▁of▁sentence｜>",
    ),
    "kimi": Style(
        KIMI,
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
        ("<think>", "</think>", *_KIMI_CALLS),
        end="<|im_end|>",
    ),
    "harmony": Style(HARMONY, _HARMONY_TOKENS, end="<|return|>"),
    "gemma": Style(GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), end="<end_of_turn>", begin="<bos>"),
}


def styled(folder: Path, name: str) -> Any:
    """The tokenizer of ``folder`` with a style's tokens and template."""
    from transformers import AddedToken, AutoTokenizer

    style = STYLES[name]
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    tokenizer.add_tokens(
        [AddedToken(t, special=True, normalized=False) for t in style.special], special_tokens=True
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in style.speakable])
    tokenizer.eos_token = style.end
    if style.begin:
        tokenizer.bos_token = style.begin
    tokenizer.chat_template = style.template
    return tokenizer
