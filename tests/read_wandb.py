"""Reads what an offline wandb run recorded: its metrics and config live only in ``run-ID.wandb``.

The file is a LevelDB log: blocks of 32 KiB that hold chunks of (masked CRC, length, kind) and
    payload; a
record is one full chunk or a first, middle and last one, and is a protobuf ``Record``.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield each protobuf record; a bad magic number or checksum is a ValueError."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    if data[:4] != b":W&B":
        raise ValueError(f"{path} is not a wandb run file")
    position, payload = _HEADER.size, b""
    while position < len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER.size:  # too short for a header: the rest of the block is padding
            position += left
            continue
        checksum, length, kind = _HEADER.unpack_from(data, position)
        start = position + _HEADER.size
        position = start + length
        if kind == 0:
            continue
        chunk = data[start:position]
        if zlib.crc32(bytes([kind]) + chunk) != checksum:
            raise ValueError(f"{path}: bad checksum of the chunk at byte {start}")
        payload = chunk if kind in (_FULL, _FIRST) else payload + chunk
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(payload)
            yield record


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def wandb_history(path: Path) -> list[dict[str, Any]]:
    """Return the logged rows in order; "_step" is the step."""
    return [
        _items(record.history.item)
        for record in wandb_records(path)
        if record.WhichOneof("record_type") == "history"
    ]


def wandb_run(path: Path) -> dict[str, Any]:
    """Return the run's id, project, name, group, tags, config and exit code."""
    run: dict[str, Any] = {"config": {}}
    for record in wandb_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.update(
                id=record.run.run_id,
                project=record.run.project,
                name=record.run.display_name,
                group=record.run.run_group,
                tags=list(record.run.tags),
            )
            run["config"].update(_items(record.run.config.update))
        elif kind == "config":
            run["config"].update(_items(record.config.update))
        elif kind == "exit":
            run["exit_code"] = record.exit.exit_code
    return run
