"""The checkpoint that a chain of deltas gives: checked beforehand, written tensor by tensor, read back.

Before anything is written the base is compared with the digests of the first delta, and its kept files with theirs.
Each safetensors file is written as a stream: the header verbatim, then one tensor after the other. What was written is
read again and has to have the digests of the target.
Not handled: where the files go and when they appear (checkpoint/apply.py, checkpoint/in_place.py).

Paper: Section 6.1 (XOR and overwrite), Section 8 (bit-exactness)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_dcr.checkpoint.delta import Chain
from nemo_dcr.checkpoint.digests import content_digest, file_digest, tensor_digests
from nemo_dcr.checkpoint.directory import Checkpoint, tensors_of
from nemo_dcr.checkpoint.files import copy_file
from nemo_dcr.checkpoint.header import read_header
from nemo_dcr.checkpoint.manifest import FileRow
from nemo_dcr.checkpoint.progress import Progress
from nemo_dcr.checkpoint.staging import new_file
from nemo_dcr.errors import BaseMismatch, CheckpointInvalid

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Target:
    """The result of `chain` on `base`."""

    base: Checkpoint
    chain: Chain

    def check_base(self, progress: Progress) -> None:
        """Compare every tensor of the base with the first delta, and every kept file with the last one.

        Raises: BaseMismatch; CheckpointInvalid when a file of the base cannot be read.
        """
        where, rows = str(self.base.directory), self.chain.links[0].manifest.rows
        wanted = {name: row.base for name, row in rows.items() if row.base is not None}
        progress.stage("check the base", self.base.nbytes)
        missing = sorted(wanted.keys() ^ self.base.tensors.keys())
        if missing:
            raise BaseMismatch(where, f"{_listed(missing)} in only one of them")
        found = tensor_digests(self.base, progress)
        wrong = sorted(name for name in wanted if found[name] != wanted[name])
        if wrong or content_digest(found) != self.chain.base:
            raise BaseMismatch(where, f"{_listed(wrong)} of {len(wanted)} tensors with other bits, shape or dtype")
        for row in self.chain.target.files:
            path = self.base.directory / row.path
            if self.chain.holder(row) is None and not _holds(path, row):
                raise BaseMismatch(where, f"its file {row.path} is missing or another one")

    def is_present(self) -> bool:
        """True iff the base's files already are those of the target; tensors are compared by the caller."""
        headers = {file: header.raw for file, header in self.base.shards.items()}
        wanted = {row.file: row.header for row in self.chain.target.shards}
        return headers == wanted and all(_holds(self.base.directory / row.path, row) for row in self.chain.target.files)

    def changed_shards(self) -> list[str]:
        """Safetensors files of the target that the base does not already hold byte for byte."""
        return [file for file in self.chain.target.headers if not self._same_shard(file)]

    def changed_files(self) -> list[FileRow]:
        """Other files of the target that do not come from the base."""
        return [row for row in self.chain.target.files if self.chain.holder(row) is not None]

    def nbytes(self, shards: Sequence[str], files: Sequence[FileRow]) -> int:
        """Bytes that writing these files takes."""
        headers = self.chain.target.headers
        return sum(headers[file].file_bytes for file in shards) + sum(row.nbytes for row in files)

    def write(
        self, directory: Path, shards: Sequence[str], files: Sequence[FileRow], *, sync: bool, progress: Progress
    ) -> None:
        """Write these files of the target into `directory` and read them again.

        Raises: DeltaInvalid when an item contradicts its manifest; CheckpointInvalid when what was written or copied
        does not have the digests of the target; OperatorNeeded when it cannot be written.
        """
        progress.stage("write", self.nbytes(shards, files))
        for file in shards:
            header = self.chain.target.headers[file]
            with new_file(directory / file, sync=sync) as stream:
                stream.write(header.prefix())
                progress.advance(header.data_start)
                for tensor in header.tensors:
                    stream.write(self.chain.words(self.base, tensor.meta.name).data)
                    progress.advance(tensor.nbytes)
        for row in files:
            source = self.chain.holder(row) or self.base.directory / row.path
            copy_file(source, directory / row.path, row.digest, sync=sync)
            progress.advance(row.nbytes)
        self._check_written(directory, shards, progress)

    def _check_written(self, directory: Path, shards: Sequence[str], progress: Progress) -> None:
        headers = {file: read_header(directory / file) for file in shards}
        written = Checkpoint(directory, headers, tensors_of(headers, where=str(directory)), ())
        progress.stage("check the result", written.nbytes)
        rows = self.chain.target.rows
        for name, digest in tensor_digests(written, progress).items():
            if digest != rows[name].target:
                detail = f"tensor {name!r} does not have the bits of the target; the delta or this host is damaged"
                raise CheckpointInvalid(str(directory / written.tensors[name].file), detail)

    def _same_shard(self, file: str) -> bool:
        held, wanted = self.base.shards.get(file), self.chain.target.headers[file]
        unchanged = (self.chain.steps(tensor.meta.name) == (True, []) for tensor in wanted.tensors)
        return held is not None and held.raw == wanted.raw and all(unchanged)


def _holds(path: Path, row: FileRow) -> bool:
    return path.is_file() and path.stat().st_size == row.nbytes and file_digest(path) == row.digest


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
