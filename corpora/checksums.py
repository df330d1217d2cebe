"""Checksums of a .bin/.idx pair, in files beside it: of whole files, and of blocks to sample.

PREFIX.sha256   the format of `sha256sum`, one line for the .bin, one for the .idx
PREFIX.crc32    little-endian: 8 bytes TRINECRC, u64 bytes in a block, u64 bytes of the .bin,
                u64 bytes of the .idx, u32 CRC-32 of each block of the .bin, then of the .idx
"""

import hashlib
import os
import random
import struct
from pathlib import Path

import numpy as np
from isal import isal_zlib

from config.messages import UserError

MAGIC = b"TRINECRC"
HEADER = struct.Struct("<8sQQQ")
BLOCK = 1 << 18
SUFFIXES = (".bin", ".idx")
SAMPLED = 4  # blocks that each process reads at the start of a run


def checksums_of(prefix: str, source: str | None = None) -> dict[str, bytes]:
    """Return the contents of both checksum files of a pair, by suffix.

    prefix: the pair's name in PREFIX.sha256. source: the prefix to read from, if it is another.
    """
    lines = []
    sums = []
    sizes = []
    for suffix in SUFFIXES:
        digest = hashlib.sha256()
        size = 0
        with open((source or prefix) + suffix, "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                sums.append(isal_zlib.crc32(block))
                size += len(block)
        sizes.append(size)
        lines.append(f"{digest.hexdigest()}  {os.path.basename(prefix + suffix)}\n")
    blocks = HEADER.pack(MAGIC, BLOCK, *sizes) + np.array(sums, "<u4").tobytes()
    return {".sha256": "".join(lines).encode(), ".crc32": blocks}


def check_blocks(prefix: str, count: int | None = SAMPLED) -> int:
    """Compare `count` random blocks of a pair (None: all blocks) with their sums in PREFIX.crc32.

    Return the number of blocks compared: 0 if there is no PREFIX.crc32. Raise UserError if a block
    or a file's size differs, or a file cannot be read.
    """
    path = Path(prefix + ".crc32")
    if not path.exists():
        return 0
    try:
        return _check_blocks(prefix, path, count)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror}") from None


def _check_blocks(prefix: str, path: Path, count: int | None) -> int:
    header, block, sizes, sums = _read(path)
    counts = [-(-size // block) for size in sizes]
    if header != MAGIC or len(sums) != sum(counts):
        raise UserError(f"{path} is damaged: remove it, or prepare the corpus again")
    for suffix, size in zip(SUFFIXES, sizes):
        actual = os.path.getsize(prefix + suffix)
        if actual != size:
            now = f"has {actual} bytes and had {size} when it was written"
            raise UserError(f"{prefix}{suffix} {now} ({path.name})")
    every = range(len(sums))
    for number in every if count is None else random.sample(every, min(count, len(sums))):
        suffix, place = (".bin", number) if number < counts[0] else (".idx", number - counts[0])
        with open(prefix + suffix, "rb") as file:
            file.seek(place * block)
            found = isal_zlib.crc32(file.read(block))
        if found != sums[number]:
            where = f"bytes {place * block} to {(place + 1) * block} of {prefix}{suffix}"
            raise UserError(f"{where} have changed since they were written ({path.name})")
    return len(sums) if count is None else min(count, len(sums))


def _read(path: Path) -> tuple[bytes, int, list[int], np.ndarray]:
    raw = path.read_bytes()
    if len(raw) < HEADER.size or (len(raw) - HEADER.size) % 4:
        return b"", 1, [0, 0], np.empty(0, "<u4")
    header, block, *sizes = HEADER.unpack(raw[: HEADER.size])
    return header, max(block, 1), sizes, np.frombuffer(raw, "<u4", offset=HEADER.size)
