"""Whole-surface prediction in one exact pass: every rank its share of the cells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from cpflare.config import EngineConfig
from cpflare.data.loader import ShardReader
from cpflare.data.sampler import Window
from cpflare.engine import predicting
from cpflare.errors import DataError
from cpflare.files import one_line
from cpflare.models import Backbone
from cpflare.parallel.comm import Communicator
from cpflare.precision import autocast


@dataclass(frozen=True)
class Inference:
    """How a model is run without gradients: where, in which precision, within which memory."""

    device: torch.device
    precision: str
    engine: EngineConfig


def predict_shard(
    model: Backbone, reader: ShardReader, window: Window, inference: Inference
) -> dict[str, np.ndarray]:
    """Physical fields of this rank's tokens of a window, by canonical name, in window order.

    Communication: the model's reductions; every rank of the reader's CP group must call it.
    """
    arrays = reader.read_fields(window, reader.normalizer.read)
    case = reader.store.case(window.case)
    inputs = reader.normalizer.encode_inputs(arrays, case.offset, reader.dtype, case.parameters)
    return reader.normalizer.decode_targets(run_model(model, inputs, inference))


def run_model(model: Backbone, inputs: torch.Tensor, inference: Inference) -> torch.Tensor:
    """The model's outputs without gradients, streamed.

    [n, F] on the CPU -> [n, O] on the device
    """
    was_training = model.training
    model.eval()
    try:
        with (
            torch.no_grad(),  # not inference mode, for which compiled parts would be compiled again
            predicting(model, inputs.shape[0], inference.engine),
            autocast(inference.device, inference.precision),
        ):
            outputs: torch.Tensor = model(inputs.to(inference.device))
    finally:
        model.train(was_training)
    return outputs


def gather_in_source_order(
    fields: dict[str, np.ndarray], source_rows: np.ndarray, sizes: list[int], comm: Communicator
) -> dict[str, np.ndarray] | None:
    """Bring the shards' fields together on rank 0, row i of the source in row i; None on the
    others.

    `source_rows` [n]: the source's row of each of this rank's n tokens; `sizes`: tokens of each
    rank.

    Communication: one gather of the rows and one of each field.
    """
    gathered = {
        name: comm.gather_rows(torch.from_numpy(values), sizes)
        for name, values in {**fields, "source_rows": source_rows}.items()
    }
    rows = gathered.pop("source_rows")
    if rows is None:
        return None
    whole = {}
    for name, values in gathered.items():
        assert values is not None
        ordered = torch.empty_like(values)
        ordered[rows] = values
        whole[name] = ordered.numpy()
    return whole


def load_weights(model: Backbone, path: Path) -> None:
    """Load RUN_DIR/model.safetensors into a model of the run's configuration.

    Raises:
        DataError: the file is absent, damaged, or of another model.
    """
    weights = read_weights(path)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        line = one_line(error)
        raise DataError(f"weights {path} do not fit the run's configuration ({line})") from error


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a run's model.safetensors, by name.

    Raises:
        DataError: the file is absent or damaged.
    """
    if not path.is_file():
        raise DataError(f"weights {path} do not exist; let the training end, or resume it")
    try:
        return load_file(path)
    except (SafetensorError, RuntimeError, OSError) as error:
        raise DataError(f"weights {path} are damaged ({one_line(error)}); train again") from error
