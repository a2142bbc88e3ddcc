import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from ddp_models import CASES, Net, callbacks, shards  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two gloo processes saw, case by case."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(HERE / "ddp_ranks.py")]
    processes = [
        subprocess.Popen([*command, str(rank), port, str(folder)], stdout=-1, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def alone(case):
    """The same run on one device with the whole batches."""
    if case == "thawed by a metric":  # on one device nobody logs the fall
        case = "thawed"
    seed_everything(0, verbose=False)
    module = Net()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks(case),
    )
    trainer.fit(module, shards(0, 1))
    return module


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_as_one_device(ranks, case):
    first, second = (r[case]["weights"] for r in ranks)
    module = alone(case)
    for name, expected in module.named_parameters():
        assert torch.equal(first[name], second[name]), name
        if expected.is_floating_point():
            assert torch.allclose(first[name], expected, atol=1e-5), name
    assert ranks[0][case]["calls"] == (3 * 8 if case in ("checkpointing", "all") else 0)


def test_without_a_schedule_nothing_is_spent_on_what_is_frozen(ranks):
    for record in ranks[0]["frozen"]["record"]:
        assert record == {"requires_grad": False, "has_grad": False, "in_state": False}


@pytest.mark.parametrize("case", ["thawed", "thawed by a metric", "all"])
def test_a_scheduled_thaw_costs_gradients_but_no_optimizer_state(ranks, case):
    for step, record in enumerate(ranks[1][case]["record"]):
        assert record["requires_grad"]  # DDP fixed it when it wrapped the module: gradients are computed, then dropped
        assert record["has_grad"] == (step >= 4)
        assert record["in_state"] == (step >= 5)


def test_freezing_later_drops_gradients_from_then_on(ranks):
    for step, record in enumerate(ranks[1]["frozen later"]["record"]):
        assert record["has_grad"] == (step < 4)
