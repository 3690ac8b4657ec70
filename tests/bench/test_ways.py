"""Ways to give an engine a policy, in the refit benchmark: which there are, and that each is what it says."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from fp8refit import Refitter, UnsupportedEngineError
from fp8refit.bench import RefitBenchConfig, policies, run_refit_bench, write_config
from fp8refit.bench import refit as refit_bench
from fp8refit.bench.engine import Loads, RefitBoot, Strategy, open_bench_engine
from fp8refit.bench.refit import _Bench
from fp8refit.bench.server import BenchServer, Clients
from fp8refit.bench.sources import Sources
from fp8refit.cli import app

CPU = torch.device("cpu")
WAYS = ("generator", "function", "changes-counted", "verify", "new-memory", "cpu", "lora", "lora-fp32", "update-512mib")
WAYS += ("update-2gib", "update-tensors", "update-generator")
SERVER = """
import http.server, json, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.answer(b"")
    def do_POST(self): self.answer(self.rfile.read(int(self.headers["Content-Length"])))
    def answer(self, body):
        self.send_response(500 if b"ill" in body else 200); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
if "--broken" in sys.argv: sys.exit("there is no such model")
port = int(sys.argv[-1].partition("=")[2])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


def opened(shape, folder):
    write_config(shape, folder)
    engine = open_bench_engine("transformers", RefitBoot(model=folder))
    refitter = Refitter(engine.candidate)
    policy = policies.fill(policies.allocate(refitter.layout(), CPU), 1)
    sources = Sources(engine, refitter, {}, CPU)
    return refitter, policy, {way.name: way for way in sources.ways(policy)}


def test_an_engine_in_this_process_has_every_way_but_broadcasts(tmp_path):
    refitter, policy, ways = opened("tiny", tmp_path)
    assert tuple(ways) == WAYS
    refitter.refit(policy)
    expected = refitter.fingerprints()
    for name, way in ways.items():
        refitter.refit({key: -tensor for key, tensor in policy.items()})
        assert refitter.fingerprints() != expected
        way.prepare(policy)
        way.update(policy)
        assert (refitter.fingerprints() == expected) is not name.startswith("lora"), name
        assert way.is_on_request


def test_a_merged_adapter_is_refitted_as_it_is(tmp_path):
    """Another policy than the one that it lies over."""
    refitter, policy, ways = opened("tiny", tmp_path)
    refitter.refit(policy)
    plain = refitter.fingerprints()
    ways["lora"].update(policy)
    merged = refitter.fingerprints()
    refitter.refit(policies.fill(policy, 2))
    ways["lora"].update(policies.fill(policy, 1))
    assert refitter.fingerprints() == merged != plain


def test_experts_lie_side_by_side_and_stacked_ones_are_the_same_memory():
    shapes = {"gate_proj": (512, 256), "up_proj": (512, 256), "down_proj": (256, 512)}
    names = {
        f"layers.{i}.mlp.experts.{e}.{part}.weight": shapes[part] for i in (0, 1) for e in range(8) for part in shapes
    }
    names |= {"layers.0.mlp.gate.weight": (8, 256), "layers.0.mlp.shared_experts.up_proj.weight": (512, 256)}
    slots = [SimpleNamespace(name=name, full_shape=shape, dtype="bfloat16") for name, shape in names.items()]
    policy = policies.fill(policies.allocate(SimpleNamespace(slots=slots), CPU), 1)
    assert {name: tuple(tensor.shape) for name, tensor in policy.items()} == names
    whole = policies.stacked(policy)
    assert {name: tuple(tensor.shape) for name, tensor in whole.items()} == {
        **{f"layers.{i}.mlp.experts.gate_up_proj": (8, 1024, 256) for i in (0, 1)},
        **{f"layers.{i}.mlp.experts.down_proj": (8, 256, 512) for i in (0, 1)},
        "layers.0.mlp.gate.weight": (8, 256),
        "layers.0.mlp.shared_experts.up_proj.weight": (512, 256),
    }
    gate_up, down = (whole[f"layers.1.mlp.experts.{part}"] for part in ("gate_up_proj", "down_proj"))
    for leaf, rows in (("gate_proj", gate_up[3, :512]), ("up_proj", gate_up[3, 512:]), ("down_proj", down[3])):
        single = policy[f"layers.1.mlp.experts.3.{leaf}.weight"]
        assert torch.equal(single, rows) and single.data_ptr() == rows.data_ptr()


def test_an_engine_that_takes_stacked_experts_has_no_other_way_for_them(tmp_path):
    _, _, ways = opened("tiny-moe", tmp_path)
    assert "stacked" not in ways and "lora" not in ways


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"clients": 2}, "clients need a server; add --place server"),
        ({"place": "outside"}, "transformers runs in this process; leave out --place"),
        ({"strategies": ("broadcast",)}, "no strategy broadcast; it has eager, generator, function"),
    ],
)
def test_what_cannot_be_measured_is_refused(changed, message):
    config = RefitBenchConfig(**{"engine": "transformers", "model": "tiny", "rounds": 1} | changed)
    with pytest.raises(UnsupportedEngineError, match=message):
        run_refit_bench(config)


def test_a_policy_is_the_same_after_every_round(tmp_path):
    """Untimed runs take it with the opposite sign."""
    config = {"engine": "transformers", "model": "tiny", "rounds": 3, "warm_up": 1, "strategies": ("generator", "cpu")}
    found = run_refit_bench(RefitBenchConfig(**config))
    assert found.is_repeatable
    assert [(other.name, other.equals_ours, other.is_repeatable) for other in found.others] == [
        ("generator", True, True),
        ("cpu", True, True),
    ]
    assert found.other("generator").first_ms > 0 and found.other("generator").phases_ms["fill"] > 0
    with pytest.raises(KeyError):
        found.other("eager")


def test_a_place_that_there_is_not_is_refused_at_the_command_line():
    ran = CliRunner().invoke(app, ["bench", "refit", "--engine", "transformers", "--model", "tiny", "--place", "moon"])
    assert ran.exit_code == 2
    assert "'inside', 'outside' or 'server'" in " ".join(ran.output.split())


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Makes servers that give back what they are sent."""
    (tmp_path / "answering.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    servers = []

    def make(**settings):
        servers.append(BenchServer("answering", settings, lambda post, prompt, num: post("/", prompt) == prompt[:num]))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def test_a_server_is_asked_and_ends(served):
    server = served(model="policy", quiet=True)
    assert server.candidate.startswith("http://127.0.0.1:")
    assert server.complete([1, 2], 2)
    assert not server.complete([1, 2], 1), "it gives another answer"
    assert not server.complete(["ill"], 3), "it answers 500"
    server.close()
    assert not server.complete([1, 2], 3), "nobody answers"


def test_a_server_that_does_not_start_says_why(served):
    with pytest.raises(UnsupportedEngineError, match="did not start: there is no such model"):
        served(broken=True)


def test_clients_ask_again_until_they_are_stopped():
    seen, enough = set(), threading.Event()

    def ask(number):
        seen.add(number)
        if len(seen) > 20:
            enough.set()
        return number % 5 != 0

    with Clients(ask, 3) as clients:
        assert enough.wait(20)
    count = len(clients.answers)
    assert clients.answers.count(False) > 0 and {0, 1, 2} <= seen
    time.sleep(0.2)
    assert len(clients.answers) == count


def test_what_a_client_raises_is_raised_when_all_are_stopped():
    def ask(number):
        raise KeyError(number)

    with pytest.raises(KeyError), Clients(ask, 2):
        pass


def test_what_a_way_leaves_is_undone_before_another_has_its_turn(tmp_path):
    write_config("tiny", tmp_path)
    engine = open_bench_engine("transformers", RefitBoot(model=tmp_path))
    events = []

    def add(what):
        return lambda *_: events.append(what)

    engine.strategies = (
        Strategy(name="a", summary="", update=add("a"), prepare=add("on"), undo=add("off"), num_untimed=1),
        Strategy(name="b", summary="", update=add("b"), loads=Loads.NOTHING),
    )
    result = _Bench(RefitBenchConfig(engine="transformers", model="tiny", rounds=2), engine, lambda *_: None).run()
    assert events == ["on", "a", "on", "a", "off", "b"] * 2
    assert [(other.loads, other.is_repeatable, other.whose_bytes) for other in result.others][1] == (
        "nothing",
        True,
        "",
    )


def test_a_bench_closes_what_it_opened_also_if_a_way_fails(tmp_path, monkeypatch):
    write_config("tiny", tmp_path)
    engine = open_bench_engine("transformers", RefitBoot(model=tmp_path))
    closed = []
    engine.close = lambda: closed.append("engine")

    def fail(_):
        raise RuntimeError("no more")

    engine.strategies = (Strategy(name="a", summary="", update=fail),)
    monkeypatch.setattr(refit_bench, "open_bench_engine", lambda *_: engine)
    monkeypatch.setattr(Refitter, "close", lambda _: closed.append("refitter"))
    with pytest.raises(RuntimeError, match="no more"):
        run_refit_bench(RefitBenchConfig(engine="transformers", model="tiny", rounds=1))
    assert closed == ["refitter", "engine"]
