"""Damage to bytes, to JSON, and to safetensors files, all of it by seed."""

import json
import random

ODD = (
    None, True, False, 0, -1, 1, 2, 7, 65_537, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e300, float("nan"),
    float("inf"), "", " ", "a", "4", "-1", "\0", "../x", "/etc/passwd", "~nosuch/x", "nan", "25%", "9" * 400, [], [[]],
    {}, [None], ["a"], [-1], [2**63], {"a": 1}, {"": {}}, "BF16", "F4", "bfloat16", "float", "gptq",
)  # fmt: skip
"""Values that are invalid for most fields."""


def damaged(data, rng):
    """Return a copy of bytes with a few changed, cut off, repeated or inserted."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, how = rng.randrange(len(found) + 1), rng.randrange(6)
        size = rng.choice((1, 4, 8, 64))
        if how == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            found[at : at + size] = rng.randbytes(len(found[at : at + size]))
        elif how == 2:
            del found[at:]
        elif how == 3:
            del found[at : at + size]
        elif how == 4:
            found[at:at] = rng.randbytes(size)
        else:
            found[at : at + size] = rng.choice((b"\0", b"\xff")) * len(found[at : at + size])
    return bytes(found)


def odd(value, rng):
    """Return a copy of a JSON value with one node replaced, removed, added or moved."""
    nodes = list(_nodes(value))
    if not nodes or rng.random() < 0.02:
        return rng.choice(ODD)
    path = rng.choice(nodes)
    copy = json.loads(json.dumps(value))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    how = rng.randrange(8)
    if how == 0:
        del parent[path[-1]]
    elif how == 1 and isinstance(parent, dict):
        parent[rng.choice((*parent, "a", "", "high", "__metadata__"))] = rng.choice(ODD)
    elif how == 2:
        parent[path[-1]] = json.loads(json.dumps(_at(value, rng.choice(nodes))))
    elif how == 3 and isinstance(parent[path[-1]], int):
        parent[path[-1]] += rng.choice((-1, 1, 2, 1 << 20))
    elif how == 4:
        parent[path[-1]] = [parent[path[-1]]]
    else:
        parent[path[-1]] = rng.choice(ODD)
    return copy


def odd_text(value, rng):
    """Mutate a value and return it as JSON text.

    Sometimes the text is invalid, or too deep or too long for a parser.
    """
    if rng.random() < 0.03:
        return rng.choice(("[" * 20_000, '{"a":' * 20_000, "9" * 6000, "", "null", "\ufeff{}", "[1,2", '"'))
    changed = value
    for _ in range(rng.choice((1, 1, 2, 4))):
        changed = odd(changed, rng)
    text = json.dumps(changed)
    return damaged(text.encode(), rng).decode("latin-1") if rng.random() < 0.1 else text


def odd_file(data, rng):
    """Damage a safetensors file anywhere, or give it a wrong header."""
    if rng.random() < 0.4:
        return damaged(data, rng)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if (metadata := header.get("__metadata__")) and rng.random() < 0.5:
        name = rng.choice(list(metadata))
        try:
            metadata[name] = odd_text(json.loads(metadata[name]), rng)
        except ValueError:
            metadata[name] = str(rng.choice(ODD))
        text = json.dumps(header).encode()
    else:
        text = odd_text(header, rng).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def seeded(*names):
    return random.Random(repr(names))


def _nodes(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _nodes(inner, (*path, key))


def _at(value, path):
    for key in path:
        value = value[key]
    return value
