"""Train the tokenizer that ships as orchard_proxy/policy/data/tiny_tokenizer.json.

    python tests/bench/train_tiny_tokenizer.py [OUT]

Byte-level BPE, 2048 tokens, over texts that lie on any Debian machine with this repository: Python sources of the
standard library, the GPL, our own docs, and JSON, shell and chat lines made here. Another machine gives slightly other
merges; that is why the file itself is committed, and why nobody needs to run this.
"""

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "orchard_proxy/policy/data/tiny_tokenizer.json"
VOCAB = 2048
# Ids 0–8, in this order. The first three are special (never in decoded text), the rest are plain markers.
MARKERS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
# A line feed is always a token of its own and a digit too: then encode(a + "\n" + b) == encode(a + "\n") + encode(b),
# which keeps the chat template's turns exact token prefixes of each other.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n|[^\S\n]+(?!\S)|[^\S\n]+"


def texts() -> Iterator[str]:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for name in ("argparse", "ast", "json/decoder", "pathlib", "subprocess", "typing", "http/server", "unittest/case"):
        yield (stdlib / f"{name}.py").read_text(encoding="utf-8")
    yield Path("/usr/share/common-licenses/GPL-3").read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("docs/*.md")):
        yield path.read_text(encoding="utf-8")
    yield from conversations()


def conversations() -> Iterator[str]:
    words = ["capital", "weather", "city", "answer", "question", "calculator", "lookup", "result", "file", "error"]
    for i in range(400):
        word = words[i % len(words)]
        arguments = {
            "command": f"ls -la /tmp/{word}",
            "path": f"/workspace/{word}.py",
            "query": f"the {word} of France",
        }
        yield json.dumps({"name": word, "arguments": arguments, "description": f"The {word} to use.", "type": "object"})
        yield f"user\nWhat is the {word}? Answer in one sentence.\n"
        yield f"assistant\nThought: I need the {word}.\nAction: {word}\n"
        yield f"Observation: the {word} is here.\n"
        yield f"Final Answer: I think that the {word} is the right one.\nsystem\ntool\n"
        yield f"$ cat {word}.py | grep -n import\n$ git commit -m 'Fix the {word}'\nNo such file or directory\n"


def train() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=MARKERS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["id"] <= 2
    return json.dumps(spec, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    out.write_text(train() + "\n", encoding="utf-8")
    print(f"{out}: {out.stat().st_size} bytes")
