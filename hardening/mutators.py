"""Changes that keep the form of an input, so that a fuzzer gets past the parser: JSON, words of a command line."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from hardening.targets import CUT

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 1000, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, float("inf"),
    float("-inf"), float("nan"), "", "x", "inf", "nan", "-1", "0", "rotation", "joint", "tree", "anneal", "head",
    "energy", "multilabel", "reflection", "marginal", "float16", "float32", "int8", "é\0\ud800", "9" * 5000, [], [1],
    [1, 2, 3], [[0.0] * 3] * 3, [None], ["a", "b"], {}, {"a": 1}, {"kind": "batch"}, {"kind": "balance"}, {"kind": []},
)  # fmt: skip
WORDS = """
    --model --bundle --levels --preset --topk --csv --json --device --size --batch --out --force --method --promise
    --refine --images --rounds --hidden --seed --column --engine --actors --cpus --gpus --shard-rows --threads --host
    --port --max-batch --max-wait-ms --queue --max-bytes --max-pixels --upload-seconds --answer-seconds --examples
    --perturb --networks --limit --data --split --mode --fit-images --mc-passes --curve --epochs --quick --datasets
    --version --help -h -- - classify explain canonicalise fit predict serve playground demo evaluate train doctor
    reproduce python:net:make zoo:digits zoo:digits:1 zoo:mnist zoo:gtsrb:99999999999999999999 zoo: zoo:x onnx:a.png
    pt2:a.png hf:. hf:a/b timm:x torchvision:x a.png . net.py gone nan inf -1 0 1 2 1e400 9999999999999999999999 cpu
    cuda cuda:99 cuda:x meta auto rotation rotation,scale reflection fast accurate documents balance bias vanilla
    affine each run grid validation digits mnist gtsrb table1 all local ray [red] [/] %s \ud800 \x00 é 🙃 a/b/c.svg
""".split()  # noqa: SIM905


def changed_json(text: bytes, random: Random) -> bytes:
    """Return JSON with one value replaced, dropped, added or copied from elsewhere; other bytes as they came."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    if isinstance(value, (dict, list)):
        walk(value)
    if not places:
        return json.dumps(random.choice(VALUES)).encode()
    node, key = random.choice(places)
    act = random.randrange(6)
    if act == 0:
        del node[key]
    elif act == 1 and isinstance(node, dict):
        node[random.choice(["x", "", "seed", "confidence", "width", "kind", "size", "é"])] = random.choice(VALUES)
    elif act == 2:
        other, name = random.choice(places)
        node[key] = json.loads(json.dumps(other[name])) if name in other or isinstance(other, list) else None
    else:
        node[key] = random.choice(VALUES)
    return json.dumps(value).encode()


def changed_json_first(data: bytes, random: Random) -> bytes:
    """Return an input whose first or second file is JSON with one or more values changed."""
    pieces = data.split(CUT, 1)
    place = random.randrange(len(pieces))
    for _ in range(random.choice((1, 1, 2, 4))):
        pieces[place] = changed_json(pieces[place], random)
    return CUT.join(pieces)


def changed_words(data: bytes, random: Random) -> bytes:
    """Return a command line with words replaced, inserted, dropped or swapped."""
    words = data.split(b"\n")
    for _ in range(random.choice((1, 1, 2, 3))):
        place = random.randrange(len(words) + 1)
        word = random.choice(WORDS).encode("utf-8", "surrogatepass")
        act = random.randrange(4)
        if act == 0:
            words.insert(place, word)
        elif words and act == 1:
            words.pop(place % len(words))
        elif words and act == 2:
            other = random.randrange(len(words))
            words[place % len(words)], words[other] = words[other], words[place % len(words)]
        elif words:
            words[place % len(words)] = word
    return b"\n".join(words)


MUTATORS = {"bundle": changed_json_first, "sidecar": changed_json_first, "command_line": changed_words}
