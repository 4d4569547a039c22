"""Order of waits, copies and events on CUDA streams, recorded by a replacement of torch.cuda."""

import pytest
import torch

from megatron_moe.parallel.streams import CudaHostCopies, CudaStreams, MetaHostCopies, make_host_copies, make_streams

GPU = torch.device("cuda")


class FakeCuda:
    """Replacement of torch.cuda whose streams and events are names; appends every call to `log`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.num_streams = 0
        self.priorities: list[int] = []
        self.current = FakeStream(self, "main")
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)

    def new_stream(self, device: torch.device, priority: int = 0) -> "FakeStream":
        self.num_streams += 1
        self.priorities.append(priority)
        return FakeStream(self, f"side {self.num_streams}")

    def set_stream(self, stream: "FakeStream") -> None:
        self.current = stream


class FakeStream:
    device_index = 0

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: "FakeStream") -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.cuda.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"event of {self.name}"


class FakeTensor:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def copy_(self, source: "FakeTensor", *, non_blocking: bool) -> None:
        assert non_blocking
        self.cuda.log.append(f"{self.cuda.current.name} copies {source.name} to {self.name}")

    def record_stream(self, stream: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} used by {stream.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_forked_stream_waits_for_the_current_one_and_a_plain_switch_does_not(cuda):
    streams = make_streams(GPU, "optimizer", "communication")
    assert isinstance(streams, CudaStreams) and cuda.num_streams == 2
    with streams.on("communication"):
        event = streams.record()
        with streams.on("compute"):
            streams.wait(event)
            streams.wait(None)
            streams.record_use(FakeTensor(cuda, "tensor"))
    with streams.fork("optimizer"):
        assert streams.record() == "event of side 1"
    assert event == "event of side 2"
    assert cuda.log == ["main waits for event of side 2", "tensor used by main", "side 1 waits for main"]


def test_new_streams_have_high_priority_on_request(cuda):
    make_streams(GPU, "communication")
    make_streams(GPU, "communication", high_priority=True)
    assert cuda.priorities == [0, -1]


def test_a_copy_to_the_host_follows_the_current_stream_and_a_copy_to_the_device_the_events_alone(cuda):
    copies = make_host_copies(GPU)
    assert isinstance(copies, CudaHostCopies)
    host, device = FakeTensor(cuda, "host"), FakeTensor(cuda, "device")
    assert copies.to_host(host, device, "read", None) == "event of side 1"
    assert cuda.log == ["side 1 waits for main", "side 1 waits for read", "side 1 copies device to host"]
    cuda.log.clear()
    assert copies.to_device(device, host, "allocated", "written") == "event of side 2"
    assert cuda.log == ["side 2 waits for allocated", "side 2 waits for written", "side 2 copies host to device"]


def test_memory_that_the_caller_frees_is_held_for_the_copy(cuda):
    copies = CudaHostCopies(GPU)
    host, device = FakeTensor(cuda, "host"), FakeTensor(cuda, "device")
    copies.to_host(host, device, free_source=True)
    copies.to_device(device, host)
    assert [line for line in cuda.log if "used by" in line] == ["device used by side 1"]


def test_on_a_cpu_a_copy_has_finished_when_it_returns():
    copies = make_host_copies(torch.device("cpu"))
    buffer = copies.host_buffer(3, torch.float32)
    assert copies.to_host(buffer, torch.arange(3.0)) is None and buffer.tolist() == [0, 1, 2]
    assert make_streams(torch.device("cpu"), "optimizer").record() is None


def test_host_buffers_of_meta_tensors_have_no_data():
    copies = make_host_copies(torch.device("meta"))
    assert isinstance(copies, MetaHostCopies) and not copies.has_data
    assert copies.host_buffer(3, torch.float32).is_meta
