"""One checkpoint: the state of a run at one step, written atomically and verified by hashes."""

import contextlib
import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors
import safetensors.torch
import torch
from annotated_types import Ge, Le
from torch import Tensor

from engine.core import files
from engine.core.cli import warn
from engine.core.errors import UserError
from engine.core.values import Count, Seconds, convert
from engine.nn.attention import check_attention
from engine.nn.bounds import DEFAULT_SIZES, set_default_sizes
from engine.nn.lora import add_lora, merge_updates
from model import GPT, Head, ModelConfig, MultiHeadAttention

Tensors = dict[str, Tensor]
ModifyModel = Callable[[GPT], None]
SaveTokenizer = Callable[[Path], None]
FORMAT_GATHERED = 11
FORMAT_SHARDED = 12
COMMON_FILES = ("state.json", "tokenizer.json")  # of both formats
MAX_SHARDS = 99_999  # five digits of a file name


@dataclass(frozen=True)
class BaseReference:
    """Where the base model of an adapter was, and the hashes of its files."""

    path: str
    sha256: dict[str, str]


@dataclass(frozen=True)
class RunState:
    """The content of state.json: a run at a step, without tensors."""

    model: ModelConfig
    step: Count = 0
    tokens: Count = 0
    elapsed_seconds: Seconds = 0.0
    progress: Annotated[float, Ge(0), Le(1)] = 0.0  # of the run
    evaluation: dict[str, Any] | None = None  # of this step: a record of metrics.jsonl
    best_evaluation: dict[str, Any] | None = None  # of the best step so far
    changes: list[dict[str, Any]] = field(default_factory=list)  # settings, by each resume
    settings: dict[str, Any] = field(default_factory=dict)
    data_sha256: str = ""
    examples: Literal["pairs", "chats"] | None = None
    documents: Count = 2
    imported: str | None = None  # what it was imported from
    base: BaseReference | None = None  # of an adapter
    is_modified: bool = False  # by a function of the caller of train()
    definition: str = ""  # with --attention loop: hash_definition() at that time

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", set_default_sizes(self.model))
        for record in (self.evaluation, self.best_evaluation):
            if record is not None and not isinstance(record.get("val_loss"), float):
                raise ValueError(f"an evaluation must have val_loss (got {record})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk; :meth:`verify` checks the files that are about to be read."""

    path: Path
    state: RunState
    sha256: dict[str, str]  # by file name
    shards: int = 0  # 0: gathered
    base: "Checkpoint | None" = None  # of an adapter, to read its model

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def is_chat_model(self) -> bool:
        return self.state.examples == "chats"

    @property
    def model_files(self) -> list[str]:
        """The names of the files that sampling and export read."""
        return [*tensor_files("model", self.shards), *COMMON_FILES]

    def verify(self, names: Iterable[str] | None = None) -> "Checkpoint":
        """Compare files, by default all, with their hashes. Raises UserError if one differs."""
        for name in self.sha256 if names is None else names:
            _verify_file(self.path, name, self.sha256[name])
        return self

    @property
    def dtype(self) -> str:
        """The dtype of the token embedding, without "torch."."""
        tensors = self.base.model() if self.base else self.model()
        embedding = next(value for name, value in tensors if name == "token_embedding.weight")
        return str(embedding.dtype).removeprefix("torch.")

    def reference(self, run: Path | None = None) -> BaseReference:
        """Return where this model is, and its hashes; the run of an adapter protects it."""
        if run:
            with contextlib.suppress(OSError), open(adapters_file(self.path), "ab") as file:
                file.write(os.fsencode(run.resolve()) + b"\n")
        names = tensor_files("model", self.shards)
        return BaseReference(str(self.path.resolve()), {name: self.sha256[name] for name in names})

    def model(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of every parameter, on the CPU: bfloat16 if so imported.

        An adapter has only those that it trains.
        """
        return self._tensors("model")

    def merged_model(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of every parameter; an adapter's base, with its updates."""
        if self.base is None:
            return self.model()
        config = self.state.model
        params = {**dict(self.base.merged_model()), **dict(self.model())}
        return merge_updates(params, config.num_heads // config.num_groups)

    def optimizer(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of every tensor of the optimizer's state, on the CPU."""
        return self._tensors("optimizer")

    def _tensors(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of every tensor of a kind, joined from its shards."""
        files_by_name: dict[str, list[Any]] = {}
        with contextlib.ExitStack() as stack:
            for name in tensor_files(kind, self.shards):
                try:
                    file = stack.enter_context(safetensors.safe_open(self.path / name, "pt"))
                except safetensors.SafetensorError as error:
                    raise UserError(f"{self.path / name}: corrupted ({error}).") from None
                for key in file.keys():  # noqa: SIM118
                    files_by_name.setdefault(key, []).append(file)
            for key, shard_files in files_by_name.items():
                pieces = [file.get_tensor(key) for file in shard_files]
                yield key, pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def tensor_files(kind: str, shards: int) -> list[str]:
    """Return the files of a kind, model or optimizer: one for each shard; 0 shards: gathered."""
    if not shards:
        return [f"{kind}.safetensors"]
    return [f"{kind}-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)]


def write_checkpoint(
    path: Path, state: RunState, model: Tensors, optimizer: Tensors, save_tokenizer: SaveTokenizer
) -> None:
    """Write a gathered checkpoint atomically. Raises OSError if it can't be written."""
    with files.atomic_directory(path) as directory:
        hashes = write_shard(directory, 0, 0, model, optimizer)
        _write_manifest(directory, {"format": FORMAT_GATHERED}, hashes, state, save_tokenizer)


def write_shard(
    directory: Path, rank: int, shards: int, model: Tensors, optimizer: Tensors
) -> dict[str, str]:
    """Write the tensor files of one rank and return their hashes; 0 shards: gathered."""
    hashes = {}
    for kind, tensors in (("model", model), ("optimizer", optimizer)):
        file = directory / tensor_files(kind, shards)[rank]
        write_tensors(file, tensors)
        files.chmod_and_fsync(file)
        hashes[file.name] = files.sha256(file)
    return hashes


def complete_shards(
    path: Path,
    directory: Path,
    state: RunState,
    save_tokenizer: SaveTokenizer,
    hashes: dict[str, str],
) -> None:
    """Make a checkpoint of the shards in a directory, atomically, and remove the directory."""
    manifest = {"format": FORMAT_SHARDED, "shards": len(hashes) // 2}
    with files.atomic_directory(path) as target:
        for name in hashes:
            (directory / name).rename(target / name)
        _write_manifest(target, manifest, hashes, state, save_tokenizer)
    directory.rmdir()


def write_tensors(file: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. Raises OSError if it can't be written."""
    try:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(contiguous, file, metadata)
    except safetensors.SafetensorError as error:  # also for a full disk
        raise OSError(f"{file}: can't be written ({error}).") from None


def _write_manifest(
    directory: Path,
    manifest: dict[str, Any],
    tensor_hashes: dict[str, str],
    state: RunState,
    save_tokenizer: SaveTokenizer,
) -> None:
    """Write the state, the tokenizer, and last the manifest."""
    files.write_json(directory / "state.json", asdict(state))
    save_tokenizer(directory / "tokenizer.json")
    hashes = tensor_hashes | {name: files.sha256(directory / name) for name in COMMON_FILES}
    files.write_json(directory / "manifest.json", {**manifest, "files": hashes})


def adapters_file(path: Path) -> Path:
    """Return the file beside a checkpoint that lists the adapters' runs, and keeps it from pruning.

    It stays when the checkpoint is written again, or a run moved, until the user deletes it.
    """
    return Path(f"{path.resolve()}.adapters.txt")


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder; of its files only state.json is verified.

    Raises UserError if there is none, or one that is corrupted or of another format.
    """
    if not (path / "manifest.json").is_file():
        raise UserError(f"{path}: not a checkpoint (manifest.json not found).")
    manifest = files.read_json(path / "manifest.json")
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version not in (FORMAT_GATHERED, FORMAT_SHARDED):
        problem = f"unsupported checkpoint format in manifest.json (got {version!r})"
        raise UserError(f"{path}: {problem}. Use the version that wrote it.")
    hashes = manifest.get("files")
    shards = manifest.get("shards") if version == FORMAT_SHARDED else 0
    has_shards = type(shards) is int and shards in range(MAX_SHARDS + 1)
    if not isinstance(hashes, dict) or not has_shards:
        raise UserError(f"{path}: corrupted, its manifest.json has no files or shards.")
    names = [*tensor_files("model", shards), *tensor_files("optimizer", shards), *COMMON_FILES]
    missing = [name for name in names if name not in hashes]
    if missing:
        raise UserError(f"{path}: corrupted, its manifest.json lacks {', '.join(missing)}.")
    _verify_file(path, "state.json", hashes["state.json"])
    state = read_state(path)
    return Checkpoint(path, state, {name: hashes[name] for name in names}, shards)


def read_state(path: Path) -> RunState:
    """Return the content of a checkpoint's state.json. Raises UserError if it is corrupted."""
    file = path / "state.json"
    try:
        values = files.read_json(file)
        state = convert(values, RunState, "state")
        unset = [name for name in DEFAULT_SIZES if values["model"].get(name) is None]
        if unset:  # RunState would have a default
            raise UserError(f"state.model.{unset[0]}: is missing")
        return state
    except UserError as error:
        raise UserError(f"{file}: corrupted ({error}).") from None


def _verify_file(path: Path, name: str, expected_hash: str) -> None:
    """Raise UserError if a file of a checkpoint is missing or has another hash."""
    file = path / name
    if not file.is_file() or files.sha256(file) != expected_hash:
        raise UserError(f"{file}: missing or corrupted (SHA-256 mismatch).")


def check_modification(checkpoint: Checkpoint, modify_model: ModifyModel | None) -> None:
    """Raise UserError for a model that a function of the caller changed, without this function."""
    if checkpoint.state.is_modified and modify_model is None:
        problem = "the model was changed by a function, modify_model of train()"
        advice = "Give this function again: load(path, modify_model=…) in sample.py"
        raise UserError(f"{checkpoint.path}: {problem}. {advice}.")


def check_definition(checkpoint: Checkpoint) -> None:
    """Warn of a model that ``--attention loop`` trained with another definition than today's."""
    if checkpoint.state.definition not in ("", hash_definition()):
        warn(f"{checkpoint.path}: was trained with another definition of attention in model.py")


def hash_definition() -> str:
    """Return a hash of the source of attention, which ``--attention loop`` computes with."""
    source = inspect.getsource(Head) + inspect.getsource(MultiHeadAttention)
    return hashlib.sha256(source.encode()).hexdigest()


def build_meta_model(
    config: ModelConfig, lora: tuple[Any, ...] = (), modify_model: ModifyModel | None = None
) -> GPT:
    """Return a model whose parameters have shapes only; ``lora`` are arguments of add_lora."""
    with torch.device("meta"):
        model = GPT(config)
        if lora:
            add_lora(model, *lora)
        if modify_model:
            modify_model(model)
    return model


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype = torch.float32,
    modify_model: ModifyModel | None = None,
) -> GPT:
    """Return the model of a checkpoint in a dtype. Raises UserError unless its weights fit.

    ``modify_model`` changes the model as in training.
    """
    check_modification(checkpoint, modify_model)
    check_definition(checkpoint)
    weights = {name: value.to(dtype) for name, value in checkpoint.merged_model()}
    config = checkpoint.state.model
    message = f"{checkpoint.path}: corrupted, its weights do not match its state.json"
    if config.num_layers * config.num_heads > len(weights):
        raise UserError(f"{message} ({len(weights)} tensors for {config.num_layers} layers).")
    model = build_meta_model(config, (), modify_model)  # no memory for a shape that does not match
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    for name in sorted(shapes.keys() | weights.keys()):
        shape = tuple(weights[name].shape) if name in weights else None
        if shape != shapes.get(name):
            raise UserError(f"{message} ({name} must be {shapes.get(name)}, got {shape}).")
    check_attention(model)
    model.load_state_dict(weights, assign=True)
    return model.eval()
