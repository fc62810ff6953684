"""Model directories damaged on purpose, by readers and writers that are not Mosaic's, and what mosaic-verify finds."""

import hashlib
import json
import re

import numpy as np

from mosaic.convert.verify import verify
from mosaic.format import index

INDEX = "model.safetensors.index.json"
ALL = [f"V{number}" for number in range(1, 18)]

TEXT = "model.language_model."
FIRST, SECOND, OUTSIDE, MTP = "layers-00.safetensors", "layers-01.safetensors", "outside.safetensors", "mtp.safetensors"
NORM = f"{TEXT}layers.1.input_layernorm.weight"
POST = f"{TEXT}layers.1.post_attention_layernorm.weight"
QUERY = f"{TEXT}layers.1.self_attn.q_proj.weight"
KEY = f"{TEXT}layers.1.self_attn.k_proj.weight"
EXPERT = f"{TEXT}layers.1.mlp.experts.2.up_proj.weight"


class Shard:
    """A shard as a list of [name, dtype, shape, bytes] in file order. Its own reader and writer, not Mosaic's."""

    def __init__(self, file):
        self.file = file
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        table = json.loads(content[8 : 8 + length])
        self.metadata = table.pop("__metadata__")
        data = content[8 + length :]
        entries = sorted(table.items(), key=lambda item: item[1]["data_offsets"])
        self.entries = [
            [name, e["dtype"], e["shape"], data[e["data_offsets"][0] : e["data_offsets"][1]]] for name, e in entries
        ]

    def place(self, name):
        return next(i for i, entry in enumerate(self.entries) if entry[0] == name)

    def __getitem__(self, name):
        return self.entries[self.place(name)]

    def write(self, page=4096):
        table, end = {"__metadata__": self.metadata}, 0
        for name, dtype, shape, data in self.entries:
            table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
            end += len(data)
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % page)
        self.file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(entry[3] for entry in self.entries))


def change_json(file, change):
    value = json.loads(file.read_text())
    replaced = change(value)
    file.write_text(json.dumps(value if replaced is None else replaced))


def set_bytes(model, file, name, position, data):
    """Overwrite bytes of one tensor."""
    shard = Shard(model / file)
    entry = shard[name]
    entry[3] = entry[3][:position] + data + entry[3][position + len(data) :]
    shard.write()


def list_again(model):
    """Make model.safetensors.index.json what the shards hold."""
    shards = [Shard(file) for file in sorted(model.glob("*.safetensors"))]
    weight_map = {entry[0]: shard.file.name for shard in shards for entry in shard.entries}
    total = sum(len(entry[3]) for shard in shards for entry in shard.entries)
    (model / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def index_again(model):
    """Make offsets and CRCs of experts.npy what the shards hold; shapes and dtypes as they were."""
    rows = np.load(model / "experts.npy")
    for row in rows:
        file = model / row["shard"].decode()
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        table = json.loads(content[8:start])
        base = next(
            re.sub(r"gate_proj\.weight$", "", name)
            for name in table
            if name.endswith(f".layers.{row['layer']}.mlp.experts.{row['expert']}.gate_proj.weight")
        )
        row["offset"] = start + table[f"{base}gate_proj.weight"]["data_offsets"][0]
        row["scale_offset"] = start + table[f"{base}gate_proj.weight_scale_inv"]["data_offsets"][0]
        span = int(row["gate_nbytes"] + row["up_nbytes"] + row["down_nbytes"])
        data = content[int(row["offset"]) :][:span]
        row["crc32c"] = index.crc32c(data + content[int(row["scale_offset"]) :][: int(row["scale_nbytes"])])
    np.save(model / "experts.npy", rows)


def seal(model):
    """Make sizes and sha256 in the catalog those of the files."""

    def change(value):
        for name in list(value["files"]):
            data = (model / name).read_bytes()
            value["files"][name] = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    change_json(model / "mosaic.json", change)


def states(model):
    """({invariant: failures} of what was found false, what was not checked)."""
    results = verify(model)
    assert sorted(result.invariant for result in results) == sorted(ALL)
    return (
        {result.invariant: result.failures for result in results if result.checked and not result.holds},
        {result.invariant for result in results if not result.checked},
    )


def only(model, invariant, *also):
    """The sealed directory breaks this invariant, and no other but those that come with it.

    V17 comes with whatever changes a code, a scale or the report; it has tests of its own.
    """
    seal(model)
    failures, unchecked = states(model)
    assert invariant in failures
    assert not failures.keys() - {invariant, "V17", *also}, failures
    if invariant not in ("V1", "V4", "V6"):
        assert not unchecked
    assert all(text for texts in failures.values() for text in texts)
    return "\n".join(failures[invariant])
