"""The table of variables: parsing, defaults, errors that help, warnings for misspelt names."""

import warnings

import pytest

from hdma import env, errors, tensors


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in [name for name in env.os.environ if name.startswith("HDMA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(env, "_warned", set())


def test_defaults():
    assert env.RANKS_PER_NODE.read() is None
    assert env.WIRE.read() == "auto" and env.DEVICE.read() == "auto"
    assert env.TIMEOUT_S.read() == 300.0
    assert env.WINDOW_NBYTES.read() is None and env.CHUNK_NBYTES.read() == 0
    assert env.NIC.read() is None and env.GID_INDEX.read() is None
    assert env.MTU_NBYTES.read() == env.SERVICE_LEVEL.read() == env.TRAFFIC_CLASS.read() == env.QP_TIMEOUT.read() == 0
    assert env.QP_RETRIES.read() == 6
    assert env.RENDEZVOUS.read() is None and env.DEBUG.read() == "WARN"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("64K", 65536), ("64KiB", 65536), ("64kb", 65536), ("1.5 MiB", 3 << 19), ("2G", 2 << 30)],
)
def test_nbytes(monkeypatch, text, nbytes):
    monkeypatch.setenv("HDMA_WINDOW_BYTES", text)
    assert env.WINDOW_NBYTES.read() == nbytes


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (env.WINDOW_NBYTES, "big"),
        (env.WINDOW_NBYTES, "-1"),
        (env.WINDOW_NBYTES, "100"),
        (env.WINDOW_NBYTES, "1T"),
        (env.CHUNK_NBYTES, "0.3K"),
        (env.RANKS_PER_NODE, "0"),
        (env.RANKS_PER_NODE, "2.5"),
        (env.TIMEOUT_S, "0"),
        (env.TIMEOUT_S, "nan"),
        (env.TIMEOUT_S, "inf"),
        (env.WIRE, "carrier pigeon"),
        (env.DEVICE, "tpu"),
        (env.NIC, "^mlx5_0,^mlx5_1"),
        (env.NIC, "mlx5_0,"),
        (env.NIC, "mlx5_0:0"),
        (env.NIC, "^"),
        (env.GID_INDEX, "-1"),
        (env.MTU_NBYTES, "1500"),
        (env.SERVICE_LEVEL, "16"),
        (env.TRAFFIC_CLASS, "256"),
        (env.QP_TIMEOUT, "32"),
        (env.QP_RETRIES, "8"),
        (env.DEBUG, "LOUD"),
    ],
)
def test_refused(monkeypatch, variable, text):
    """The error says which variable, its value, what is accepted and what to do."""
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(errors.UsageError) as caught:
        variable.read()
    message = str(caught.value)
    assert variable.name in message and repr(text) in message and "unset it for the default" in message
    assert "it must be" in message or "has 4 KiB" in message


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (env.WIRE, "Verbs", "verbs"),
        (env.NIC, "mlx5_0, mlx5_1:2", "mlx5_0,mlx5_1:2"),
        (env.NIC, "^rxe0", "^rxe0"),
        (env.GID_INDEX, "0", 0),
        (env.MTU_NBYTES, "1024", 1024),
        (env.SERVICE_LEVEL, "15", 15),
        (env.TRAFFIC_CLASS, "106", 106),
        (env.QP_TIMEOUT, "18", 18),
        (env.QP_RETRIES, "0", 0),
    ],
)
def test_rdma(monkeypatch, variable, text, value):
    monkeypatch.setenv(variable.name, text)
    assert variable.read() == value


def test_read_at_use(monkeypatch):
    monkeypatch.setenv("HDMA_TIMEOUT_S", "1.5")
    assert env.TIMEOUT_S.read() == 1.5
    monkeypatch.setenv("HDMA_TIMEOUT_S", " ")
    assert env.TIMEOUT_S.read() == 300.0
    monkeypatch.setenv("HDMA_DEBUG", "trace")
    assert env.DEBUG.read() == "TRACE"


def test_the_device_is_not_read_for_every_array(monkeypatch):
    """Reading looks at all variables, which takes longer than a call; a change is seen all the same."""
    read, scan = [], env.warn_unknown
    monkeypatch.setattr(env, "warn_unknown", lambda: (read.append(0), scan()))
    monkeypatch.setenv("HDMA_DEVICE", "hip")
    assert {tensors.runtime() for _ in range(5)} == {"hip"} and len(read) <= 1
    monkeypatch.setenv("HDMA_DEVICE", "cuda")
    assert tensors.runtime() == "cuda"
    for _ in range(2):
        monkeypatch.setenv("HDMA_DEVICE", "host")
        with pytest.raises(errors.UsageError, match="HDMA_DEVICE=host: unset it"):
            tensors.runtime()


def test_unknown_name_warns_once(monkeypatch):
    monkeypatch.setenv("HDMA_TIMEOUTS", "3")
    with pytest.warns(RuntimeWarning, match="HDMA_TIMEOUTS has no effect.*did you mean HDMA_TIMEOUT_S?"):
        env.WIRE.read()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.WIRE.read()


def test_agreed(monkeypatch):
    monkeypatch.setenv("HDMA_RANKS_PER_NODE", "2")
    agreed = env.agreed()
    assert agreed["HDMA_RANKS_PER_NODE"] == "2" and agreed["HDMA_WINDOW_BYTES"] == "None"
    assert {"HDMA_MTU", "HDMA_SERVICE_LEVEL", "HDMA_TRAFFIC_CLASS"} <= {*agreed}
    assert not {"HDMA_TIMEOUT_S", "HDMA_NIC", "HDMA_GID_INDEX"} & {*agreed}


def test_table_is_whole():
    """A variable that is defined but not in the table would be reported as unknown."""
    defined = {value for value in vars(env).values() if isinstance(value, env.Variable)}
    assert {variable.name for variable in defined} == {variable.name for variable in env.TABLE}
