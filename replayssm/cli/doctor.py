"""What runs on this machine and why: versions against the supported ranges, the GPU, backends, optional packages."""

import importlib
import importlib.metadata
import platform
import warnings
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

import replayssm
from replayssm import bundled
from replayssm.loading.architectures import MODEL_TYPES

Version = tuple[int, ...]


class Part(BaseModel):
    """A program or package this one stands on. `version` is None where it is missing or cannot be imported."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str | None
    supported: str
    ok: bool
    note: str


class Backend(BaseModel):
    """One way to run the operators."""

    model_config = ConfigDict(frozen=True)

    name: str
    available: bool
    reason: str


class OptionalPackage(BaseModel):
    """A package that need not be there. `effect` says what its presence or absence means on this machine."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str | None
    effect: str


class TunedFile(BaseModel):
    """A file of measured settings for this machine's GPU, the layers that it decides about, and what is to be said."""

    model_config = ConfigDict(frozen=True)

    path: str
    layers: list[str]
    note: str


class Gpu(BaseModel):
    """The GPUs that torch sees, or why it sees none."""

    model_config = ConfigDict(frozen=True)

    available: bool
    names: list[str]
    capability: str | None
    cuda: str | None
    reason: str


class Report(BaseModel):
    """Everything `replayssm doctor` tells. `ok` is False if a needed part is missing or outside its range."""

    model_config = ConfigDict(frozen=True)

    replayssm: str
    installed_at: str
    platform: str
    ok: bool
    python: Part
    torch: Part
    triton: Part
    transformers: Part
    gpu: Gpu
    backends: list[Backend]
    chosen_backend: str
    tuned: list[TunedFile]
    optional_packages: list[OptionalPackage]
    bundled_models: list[str]
    supported_model_types: list[str]


@dataclass(frozen=True)
class _Range:
    """Supported versions: from `least`, below `below`."""

    least: Version
    below: Version | None = None

    def __str__(self) -> str:
        text = ">=" + _dotted(self.least)
        return text if self.below is None else f"{text},<{_dotted(self.below)}"

    def holds(self, version: Version) -> bool:
        return self.least <= version and (self.below is None or version < self.below)


PYTHON = _Range((3, 11), (3, 13))
TORCH = _Range((2, 11))
TRITON = _Range((3, 6), (3, 10))
TRANSFORMERS = _Range((5, 17), (5, 25))


#: Packages of this project's extras: what they bring, and what is missing without them.
OWN_EXTRAS = {
    "cuda-core": (
        "compiles the kernels of the cuda backend, at their first use",
        "not installed: no cuda backend, triton runs on Hopper and newer GPUs, too (extra cuda)",
    ),
    "fastapi": ("replayssm serve", "not installed: no replayssm serve (extra serve)"),
    "uvicorn": ("replayssm serve", "not installed: no replayssm serve (extra serve)"),
    "prometheus-client": ("replayssm serve", "not installed: no replayssm serve (extra serve)"),
    "llguidance": (
        "JSON schemas and regular expressions for the engine's output",
        "not installed: requests with a schema or a regular expression are refused (extra serve)",
    ),
}


def examine() -> Report:
    """Look at this machine. No model is loaded, and nothing changes but that the cpu backend may be compiled."""
    python = _judge("python", platform.python_version(), PYTHON, needed=True)
    torch = _installed("torch", TORCH, needed=True)
    triton = _installed("triton", TRITON, needed=False)
    transformers = _installed("transformers", TRANSFORMERS, needed=True)
    gpu = _gpu() if torch.version else _no_gpu("torch cannot be imported")
    backends, chosen = _backends(torch)
    return Report(
        replayssm=replayssm.__version__,
        installed_at=str(Path(replayssm.__file__).parent),
        platform=f"{platform.system()} {platform.machine()}",
        ok=all(part.ok for part in (python, torch, triton, transformers)),
        python=python,
        torch=torch,
        triton=triton,
        transformers=transformers,
        gpu=gpu,
        backends=backends,
        chosen_backend=chosen,
        tuned=tuned_files(gpu.names[0]) if chosen == "cuda" else [],
        optional_packages=_optional_packages(gpu),
        bundled_models=list(bundled.names()),
        supported_model_types=sorted(MODEL_TYPES),
    )


def _installed(name: str, supported: _Range, *, needed: bool) -> Part:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        note = f"not installed, {supported} is needed" if needed else "not installed; only a GPU needs it, to be fast"
        return Part(name=name, version=None, supported=str(supported), ok=not needed, note=note)
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken install may raise anything, and is reported
        note = f"{found} is installed but cannot be imported: {type(error).__name__}: {error}"
        return Part(name=name, version=None, supported=str(supported), ok=not needed, note=note)
    return _judge(name, found, supported, needed=needed)


def _judge(name: str, version: str, supported: _Range, *, needed: bool) -> Part:
    inside = supported.holds(_numbers(version))
    note = "supported" if inside else f"outside the supported range {supported}"
    return Part(name=name, version=version, supported=str(supported), ok=inside or not needed, note=note)


def _gpu() -> Gpu:
    import torch

    if not torch.cuda.is_available():
        built_for = torch.version.cuda or torch.version.hip
        if built_for is None:
            return _no_gpu(f"torch {torch.__version__} is a CPU build")
        return _no_gpu(f"torch {torch.__version__} is built for CUDA {built_for}, but finds no GPU or driver")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    major, minor = torch.cuda.get_device_capability()
    return Gpu(
        available=True,
        names=names,
        capability=f"{major}.{minor}",
        cuda=torch.version.cuda,
        reason=f"torch sees {len(names)} GPU{'s' if len(names) > 1 else ''}",
    )


def _no_gpu(reason: str) -> Gpu:
    return Gpu(available=False, names=[], capability=None, cuda=None, reason=reason)


_RUNS_ON = {
    "cpu": "runs on CPUs, in C that this machine's compiler has built",
    "torch": "runs wherever PyTorch does",
    "triton": "runs on GPUs, and in its interpreter for tests",
    "cuda": "runs on NVIDIA GPUs of compute capability 9.0 and newer; what it has no kernel for runs on triton",
}


def _backends(torch: Part) -> tuple[list[Backend], str]:
    if torch.version is None:
        return [Backend(name="torch", available=False, reason=torch.note)], "none"
    from replayssm import ops

    reasons = {name: ops.unavailable_reason(name) for name in ops.BACKENDS}
    backends = [
        Backend(name=name, available=reason is None, reason=reason or _RUNS_ON[name])
        for name, reason in reasons.items()
    ]
    return backends, ops.resolve_backend("auto")


def tuned_files(gpu: str) -> list[TunedFile]:
    """Those that `replayssm tune` measured, or that ship, for a GPU with this name."""
    from replayssm import tuned
    from replayssm.backends.cuda import build

    kernels = build.fingerprint({}, "")
    tuned.forget()  # so that a spoilt file is told again
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sources = tuned.sources(gpu)
    found = [TunedFile(path="", layers=[], note=str(warning.message)) for warning in told]
    for path, file in sources:
        decided = [layer for layer in file.layers if tuned.layer_of(gpu, layer.shape) == (layer, path)]
        is_current = file.made_with.get("kernels") == kernels
        note = f"measured on {file.made_with.get('date', 'an unknown day')}" + (
            "" if is_current else ", with other kernels than these: `replayssm tune` measures them"
        )
        found.append(
            TunedFile(
                path=str(path), layers=[f"{layer.shape}: L = {layer.ring.ring_len}" for layer in decided], note=note
            )
        )
    return found


def _optional_packages(gpu: Gpu) -> list[OptionalPackage]:
    """Packages that change what transformers does, and so a prefill or a run without replay; then our own extras."""
    prefill = "transformers uses it for prefill of {layers} layers; decode with replay does not"
    no_gpu = "transformers would call its GPU kernels, which fail without a GPU; replayssm's layers avoid them"
    effects = {
        "flash-linear-attention": ("Gated DeltaNet and Kimi Delta Attention", "PyTorch code does their prefill"),
        "causal-conv1d": ("convolution", "PyTorch code does the convolution"),
        "mamba-ssm": ("Mamba-2", "PyTorch code does their prefill"),
    }
    found = []
    for name, (layers, without) in effects.items():
        version = _version_or_none(name)
        with_it = prefill.format(layers=layers) if gpu.available else no_gpu
        effect = with_it if version else f"not installed: {without}"
        found.append(OptionalPackage(name=name, version=version, effect=effect))
    for name, (with_it, without) in OWN_EXTRAS.items():
        version = _version_or_none(name)
        found.append(OptionalPackage(name=name, version=version, effect=with_it if version else without))
    return found


def _version_or_none(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> Version:
    """The leading numbers of a version: `2.13.0+cpu` gives (2, 13, 0)."""
    numbers: list[int] = []
    for piece in version.partition("+")[0].split("."):
        digits = "".join(c for c in piece if c.isdigit()) if piece[:1].isdigit() else ""
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def render(report: Report, console: Console) -> None:
    """Print a report for people."""
    console.print(f"replayssm {report.replayssm} on {report.platform}, in {report.installed_at}", soft_wrap=True)

    parts = Table("part", "version", "supported", "", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for part in (report.python, report.torch, report.triton, report.transformers):
        parts.add_row(part.name, part.version or "-", part.supported, part.note)
    console.print(parts)

    console.print(f"\nGPU: {', '.join(report.gpu.names) or 'none'} ({report.gpu.reason})")
    if report.gpu.capability:
        console.print(f"capability {report.gpu.capability}, CUDA {report.gpu.cuda}")

    console.print()
    backends = Table("backend", "", "why", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for backend in report.backends:
        chosen = ", chosen by auto" if backend.name == report.chosen_backend else ""
        backends.add_row(backend.name, ("available" if backend.available else "unavailable") + chosen, backend.reason)
    console.print(backends)
    for file in report.tuned:
        console.print(f"tuned: {file.path} ({file.note})" if file.path else f"tuned: {file.note}", soft_wrap=True)
        for layer in file.layers:
            console.print(f"  {layer}")
    if report.chosen_backend == "cuda" and not report.tuned:
        console.print("tuned: nothing yet, launch settings are chosen by rule; `replayssm tune` measures them")

    console.print()
    optional = Table("optional package", "version", "effect", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for package in report.optional_packages:
        optional.add_row(package.name, package.version or "-", package.effect)
    console.print(optional)

    console.print(f"\nbundled models: {', '.join(report.bundled_models)}")
    console.print("everything needed is here" if report.ok else "NOT OK: see the parts above")
