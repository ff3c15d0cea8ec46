"""Makes the example data of this repository: prompts from templates, answers sampled from the demo model itself.

    python tools/make_example_data.py --model models/smollm2 --out examples/data

writes ``conversations.jsonl`` (prompts with the model's own answers, temperature 0.6, and why each answer ended) and
``eval_prompts.jsonl`` (other prompts from the same templates, never answered here, for measuring acceptance).
On-policy answers matter: a drafter learns to follow its target, so it must see what the target itself would say.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NAMES = "Mina Tomas Ruth Omar Lena Viktor Aisha Jonas Clara Deniz Paul Ines Hugo Nora Samir Greta".split()
THINGS = "apples pencils stickers marbles books tickets eggs candles bottles coins shells postcards".split()
TOPICS = [
    "photosynthesis", "the water cycle", "gravity", "black holes", "the Roman Republic", "plate tectonics", "inflation", "DNA",
    "the printing press", "supply and demand", "vaccines", "the speed of light", "machine learning", "volcanoes", "the immune system",
    "renewable energy", "the French Revolution", "tides", "electric motors", "the scientific method", "coral reefs", "fermentation",
    "the stock market", "glaciers", "sleep", "bridges", "the periodic table", "probability", "compilers", "the internet",
    "batteries", "rainbows", "earthquakes", "migration of birds", "prime numbers", "democracy", "soil", "memory", "jet engines", "chess",
]  # fmt: skip
AUDIENCES = [
    "a ten-year-old",
    "a beginner",
    "a busy manager",
    "a high school student",
    "someone who hates jargon",
]
TASKS = [
    "reverses a string", "checks whether a number is prime", "counts the vowels in a text", "merges two sorted lists", "finds the largest value in a list",
    "removes duplicates from a list while keeping the order", "computes the factorial of n", "checks whether a word is a palindrome",
    "converts Celsius to Fahrenheit", "returns the n-th Fibonacci number", "sorts a list of tuples by the second element", "counts how often each word occurs",
    "flattens a nested list", "computes the greatest common divisor of two numbers", "validates an email address in a simple way", "reads a file and returns its lines",
    "splits a list into chunks of size k", "finds the second smallest number", "transposes a matrix", "computes the average of a list", "removes punctuation from a text",
    "rotates a list by k places", "checks whether two strings are anagrams", "returns all even numbers in a range", "computes the sum of the digits of a number",
    "capitalizes every word", "finds the longest word in a sentence", "computes compound interest", "converts a number to binary", "checks whether brackets are balanced",
]  # fmt: skip
SENTENCES = [
    "The meeting was moved because the manager got stuck in traffic.", "Our shop will be closed on Monday for repairs.", "The results were better than anyone expected.",
    "Please send me the report before the end of the week.", "The old bridge has been unsafe for many years.", "She forgot her umbrella and got wet on the way home.",
    "The new phone is fast but its battery does not last.", "We regret that your order has been delayed.", "The garden looks beautiful after the rain.",
    "He explained the plan twice, but nobody understood it.", "The train arrived late, so we missed the concert.", "The cake was good, although a little too sweet.",
    "Nobody told the neighbours about the party.", "The museum opens at nine and is free on Sundays.", "The software crashed while I was saving my work.",
    "Learning a language takes patience and practice.",
]  # fmt: skip
STYLES = [
    "more polite",
    "shorter",
    "more formal",
    "more cheerful",
    "simpler",
    "as a question",
    "in the past tense",
    "more dramatic",
]
KINDS = [
    "healthy breakfast ideas", "ways to save water at home", "games for a rainy day", "tips for a job interview", "animals that live in the desert", "things to pack for a hike",
    "reasons to read books", "common mistakes when cooking rice", "ways to learn vocabulary", "gifts for a gardener", "famous rivers", "uses of a spreadsheet", "signs of a good team",
    "ideas for a school project", "ways to reduce stress", "plants that need little light", "rules for writing clear emails", "exercises for the back", "inventions of the 19th century",
    "questions to ask a landlord",
]  # fmt: skip
PAIRS = [
    ("a violin", "a guitar"), ("lists", "tuples in Python"), ("coffee", "tea"), ("a comet", "an asteroid"), ("a virus", "a bacterium"), ("weather", "climate"), ("RAM", "a hard disk"),
    ("a novel", "a short story"), ("an alligator", "a crocodile"), ("stocks", "bonds"), ("HTTP", "HTTPS"), ("mass", "weight"), ("a fruit", "a vegetable"), ("a sea", "an ocean"),
]  # fmt: skip
SCENES = [
    "a lighthouse keeper",
    "a lost robot",
    "a talking cat",
    "a rainy Monday",
    "a forgotten letter",
    "the last train",
    "a small bakery",
    "a garden on the moon",
]


def make_prompt(rng: random.Random) -> tuple[str, str]:
    """One (kind, prompt)."""
    kind = rng.choices(
        ["arithmetic", "code", "question", "rewrite", "list", "compare", "story"], [5, 5, 5, 3, 3, 2, 2]
    )[0]
    if kind == "arithmetic":
        return kind, _arithmetic(rng)
    if kind == "code":
        task = rng.choice(TASKS)
        frames = [
            f"Write a Python function that {task}.", f"Write a function in Python that {task}. Add a short docstring.",
            f"Give me Python code that {task}, with an example call.", f"How would you write a Python function that {task}? Explain the code briefly.",
            f"Write a JavaScript function that {task}.", f"Write a Python function that {task} and a small test for it.",
        ]  # fmt: skip
    elif kind == "question":
        topic, audience = rng.choice(TOPICS), rng.choice(AUDIENCES)
        frames = [
            f"What is the main idea behind {topic}?", f"Explain {topic} to {audience}.", f"Why does {topic} matter?", f"Describe {topic} in three sentences.",
            f"What are the most important facts about {topic}?", f"Give a short introduction to {topic}.", f"What do people often get wrong about {topic}?",
        ]  # fmt: skip
    elif kind == "rewrite":
        sentence, style = rng.choice(SENTENCES), rng.choice(STYLES)
        frames = [
            f'Rewrite this sentence so that it is {style}: "{sentence}"',
            f"Make the following {style}.\n\n{sentence}",
            f"{sentence}\n\nPlease rewrite the text above, {style}.",
        ]
    elif kind == "list":
        n, what = rng.randint(3, 8), rng.choice(KINDS)
        frames = [
            f"List {n} {what}.",
            f"Give me {n} {what}, with one sentence about each.",
            f"What are some {what}? Name {n}.",
        ]
    elif kind == "compare":
        a, b = rng.choice(PAIRS)
        frames = [
            f"What is the difference between {a} and {b}?",
            f"Compare {a} and {b} in a short paragraph.",
            f"How are {a} and {b} alike, and how do they differ?",
        ]
    else:
        scene, n = rng.choice(SCENES), rng.randint(3, 6)
        frames = [
            f"Write a short story about {scene}.",
            f"Write {n} sentences about {scene}.",
            f"Write a short poem about {scene}.",
        ]
    return kind, rng.choice(frames)


def _arithmetic(rng: random.Random) -> str:
    a, b, c = rng.randint(3, 60), rng.randint(2, 20), rng.randint(2, 9)
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    return rng.choice(
        [
            f"{name} has {a} {thing} and buys {b} more. Then {name} gives {c} to {other}. How many {thing} does {name} have now?",
            f"A box holds {b} {thing}. How many {thing} are in {c} boxes, and how many are left if {name} takes {c}?",
            f"{name} reads {b} pages a day. How many pages does {name} read in {c} weeks?",
            f"{thing.capitalize()} cost ${c} each. {name} has ${a}. How many can {name} buy, and how much money is left?",
            f"What is {a} times {c} plus {b}? Show the steps.",
            f"A train travels {a} kilometers in {c} hours. How far does it go in {b} hours at the same speed?",
            f"{name} is {a} years old and {other} is {b} years younger. How old will {other} be in {c} years?",
            f"{name} shares {a * c} {thing} equally among {c} friends. How many does each friend get?",
            f"A ticket costs ${b}. Children pay half. What do {c} adults and {c + 1} children pay together?",
            f"{name} saves ${b} every week and spends ${c} of it. How much has {name} saved after {c + 4} weeks?",
        ]
    )


def make_prompts(count: int, seed: int) -> list[tuple[str, str]]:
    """``count`` distinct prompts."""
    rng = random.Random(seed)
    prompts: dict[str, str] = {}
    while len(prompts) < count:
        kind, prompt = make_prompt(rng)
        prompts.setdefault(prompt, kind)
    return [(kind, prompt) for prompt, kind in prompts.items()]


@torch.inference_mode()
def answer(
    model: torch.nn.Module, tokenizer: object, prompts: list[str], max_new_tokens: int
) -> list[tuple[str, str]]:
    """(answer, finish reason) for each prompt, sampled at temperature 0.6 from the model itself."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True
        )
        for p in prompts
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    out = model.generate(
        **batch, do_sample=True, temperature=0.6, top_p=0.95, top_k=0, max_new_tokens=max_new_tokens
    )
    results = []
    for row in out[:, batch["input_ids"].shape[1] :].tolist():
        stopped = tokenizer.eos_token_id in row
        ids = row[: row.index(tokenizer.eos_token_id)] if stopped else row
        results.append((tokenizer.decode(ids, skip_special_tokens=True), "stop" if stopped else "length"))
    return results


def main() -> None:
    """Generate prompts, answer them batch by batch, write the two files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--out", type=Path, default=Path("examples/data"))
    parser.add_argument("--count", type=int, default=720, help="conversations")
    parser.add_argument("--eval-count", type=int, default=40, help="held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device).eval()
    prompts = make_prompts(args.count + args.eval_count, args.seed)
    train, held_out = prompts[: args.count], prompts[args.count :]
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "eval_prompts.jsonl", "w") as file:
        for i, (kind, prompt) in enumerate(held_out):
            file.write(json.dumps({"question_id": i, "category": kind, "turns": [prompt]}) + "\n")
    start = time.time()
    with open(args.out / "conversations.jsonl", "w") as file:
        for first in range(0, len(train), args.batch):
            part = train[first : first + args.batch]
            for i, ((kind, prompt), (text, reason)) in enumerate(
                zip(part, answer(model, tokenizer, [p for _, p in part], args.max_new_tokens), strict=True)
            ):
                messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
                record = {
                    "id": f"ex{first + i:04d}",
                    "source": kind,
                    "messages": messages,
                    "finish_reasons": [reason],
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            print(f"{first + len(part)}/{len(train)} answered, {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
