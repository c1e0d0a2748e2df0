"""The independent check of the run: what a plain dense load of the trainer's weights leaves in a server.

A process of its own builds vLLM's model without an engine, poisons it, loads a checkpoint by vLLM's native loader and
computes vLLM's own checksum of every parameter. A server is exact when its checksums are the same. The same trainer
weights always give the same checksums, so each set of weights is loaded once, whichever methods reach it.
Nothing of the source, receiver or protocol code takes part.

    python -m examples.grpo.dense_digest -        (paths of checkpoints on standard input, one a line)

Paper: Section 6 (dense refit as the reference); Section 8.3   Proofs: Proposition 1
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from nemo_dcr.cli.processes import environment
from nemo_dcr.errors import InternalError


def server_digest(checksums: Mapping[str, str]) -> str:
    """One digest of the checksums of all parameters, without the prefix of a name that tells the rank."""
    rows = sorted(f"{name.rpartition(':')[2]} {value}" for name, value in checksums.items())
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


class DenseDigests:
    """Asks the process, which is started when it is first needed, or before."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process beside what else starts; importing an engine takes long."""
        self._started()

    def of(self, checkpoint: Path) -> str:
        """The digest of a server that loaded `checkpoint` densely.

        Raises: InternalError when the process ended; its log says why.
        """
        process = self._started()
        if process.stdin is None or process.stdout is None:
            raise InternalError("the dense check has no pipes")
        process.stdin.write(f"{checkpoint}\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("{"):
                return server_digest(json.loads(line))
        raise InternalError(f"the dense check ended with {process.wait()}; see {self._log}")

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "examples.grpo.dense_digest", "-"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment(),
                )
        return self._process


def main() -> None:
    """Answer each path with the checksums, as one line of JSON."""
    from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

    from nemo_dcr.adapters.vllm.forged import ForgedModel, Place
    from nemo_dcr.bits.tensors import integer_view
    from nemo_dcr.testing.checkpoint import read_checkpoint
    from nemo_dcr.testing.dense_check import POISON

    for line in sys.stdin:
        checkpoint = Path(line.strip())
        model = ForgedModel(checkpoint, Place())
        for parameter in model.module.parameters():
            width = parameter.element_size()
            poison = int.from_bytes(bytes([POISON]) * width, "little", signed=width > 1)
            integer_view(parameter.detach()).fill_(poison)
        model.load_weights((meta.name, tensor) for meta, tensor in read_checkpoint(checkpoint))
        print(json.dumps(compute_tensor_digests(model.module)), flush=True)


if __name__ == "__main__":
    main()
