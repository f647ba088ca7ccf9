"""Caches in the memory of CUDA devices, registered as tensors: see cuda_memory.py."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from coordinates import (
    DECODE_TABLE,
    PREFILL_TABLE,
    TOKENS,
    decode_engine,
    fill,
    prefill_engine,
    small_model,
    wrong_cells,
)
from cuda_memory import LIBRARY, CudaArray, DeviceMemory, Driver, Tensor
from kvferry import (
    Agent,
    ClosedError,
    CudaEvent,
    CudaStream,
    DeviceArray,
    EventKind,
    GroupRequest,
    GroupSteps,
    InvalidError,
    MemoryKind,
    NotFoundError,
    OutOfRangeError,
    Plan,
    Request,
    Shard,
    Stage,
    Status,
    Transport,
    UnsupportedError,
    Way,
    devices,
    transport_kinds,
)
from kvferry.buffers import memory_array, region_of, regions_of
from kvferry.interchange import _look_into

pytestmark = pytest.mark.skipif(
    not LIBRARY, reason="KVF_CUDA_LIBRARY names no CUDA driver, nor a stand-in for one"
)


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


class Cache:
    """A rank's cache on a device: a tensor of 32-bit floats for each region, whose axes are the shard's."""

    def __init__(self, driver: Driver, device: int, shard: Shard, *, by_dlpack: bool = True) -> None:
        self.shard = shard
        self.memory = [DeviceMemory(driver, driver.number(device), size) for size in shard.region_bytes]
        self.arrays: list[Any] = []
        for memory, (view,) in zip(self.memory, shard.regions(), strict=True):
            shape = [axis.length for axis in view.axes]
            self.arrays.append(Tensor(memory, shape) if by_dlpack else CudaArray(memory, shape))
            memory.write(np.zeros(memory.size, np.uint8))

    def fill(self, table: list[int]) -> None:
        regions = [np.zeros(memory.size, np.uint8) for memory in self.memory]
        fill(self.shard, regions, table)
        for memory, region in zip(self.memory, regions, strict=True):
            memory.write(region)

    def spoil(self) -> None:
        """Changes each byte of one region."""
        self.memory[0].write(self.memory[0].read() ^ np.uint8(0x55))

    def wrong(self, table: list[int]) -> int:
        return len(wrong_cells(self.shard, [memory.read() for memory in self.memory], table))


# ---- listing devices


def test_the_devices_are_listed(driver: Driver) -> None:
    found = devices()
    assert len(found) == driver.count
    assert [device.number for device in found] == list(range(driver.count))
    assert all(device.name and device.memory_bytes > 0 and device.driver_version >= 12000 for device in found)
    assert all(bool(device.code) != bool(device.why_not) for device in found)


def test_tests_use_one_device_where_devices_do_not_reach_each_other(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not devices()[0].name.startswith("stand-in"):
        pytest.skip("devices of a real driver reach each other, or do not")
    assert driver.number(1) == 1
    monkeypatch.setenv("FAKE_CUDA_APART", "1")
    assert driver.number(1) == 0


# ---- memory that kvferry takes


@pytest.mark.parametrize("versioned", [True, False])
def test_a_tensor_is_taken_where_it_lies_with_its_device(driver: Driver, versioned: bool) -> None:
    memory = DeviceMemory(driver, driver.number(1), 4096)
    tensor = Tensor(memory, (4, 8, 16), element="bf16", offset=512, versioned=versioned)
    region = region_of(tensor)
    assert (region.address, region.bytes, region.element) == (memory.address + 512, 1024, "bf16")
    assert (region.kind, region.device, region.in_order) == (MemoryKind.CUDA, memory.device, True)
    assert tensor.asked[-1]["stream"] == -1  # kvferry only wants the address: no stream has to wait


def test_axes_of_a_tensor_may_be_in_any_order(driver: Driver) -> None:
    memory = DeviceMemory(driver, 0, 4096)
    region = region_of(Tensor(memory, (8, 4, 16), strides=(16, 128, 1), element="f16"))
    assert (region.bytes, region.strides, region.in_order) == (1024, (32, 256, 2), False)


def test_the_device_of_an_array_without_dlpack_is_asked_of_the_driver(driver: Driver) -> None:
    for wanted in range(2):
        memory = DeviceMemory(driver, driver.number(wanted), 4096)
        region = region_of(CudaArray(memory, (4, 8), strides=(4, 16)))
        assert (region.address, region.bytes, region.element) == (memory.address, 128, "f32")
        assert (region.kind, region.device, region.in_order) == (MemoryKind.CUDA, memory.device, False)


def test_an_object_that_cannot_be_a_region_is_refused_with_a_sentence(driver: Driver) -> None:
    memory = DeviceMemory(driver, 0, 4096)
    host = np.zeros(64)
    cases: list[tuple[Any, str]] = [
        (Tensor(memory, (4, 8), strides=(16, 1)), r"shape \(4, 8\) and strides \(16, 1\) has holes"),
        (Tensor(memory, (4, 8), flags=1), "read-only"),
        (Tensor(memory, (4, 8), flags=2), "gave a copy"),
        (Tensor(memory, (0, 8)), "0 bytes"),
        (CudaArray(memory, (4, 8), read_only=True), "read-only"),
        (CudaArray(memory, (4, 8), mask=object()), "mask"),
        (CudaArray(memory, (4, 8), strides=(64, 4)), "holes"),
        (CudaArray(memory, (4, 8), strides=(33, 4)), "holes"),
        (
            CudaArray(memory, (4, 8), data=(host.ctypes.data, False)),
            "no CUDA device of this process has memory",
        ),
    ]
    for buffer, message in cases:
        with pytest.raises(InvalidError, match=message):
            region_of(buffer)
    with pytest.raises(UnsupportedError, match="little-endian"):
        region_of(CudaArray(memory, (4, 8), typestr=">f4"))


def test_a_tensor_of_torch_is_taken_where_another_device_is_current(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [driver.number(0)]

    class TorchTensor(Tensor):
        """Refuses as torch does, from 2.10 on."""

        def __dlpack__(self, **options: Any) -> Any:
            _, mine = self.__dlpack_device__()
            if mine != current[0]:
                raise BufferError("Can't export tensors on a different CUDA device index")
            return super().__dlpack__(**options)

    @contextlib.contextmanager
    def device(number: int) -> Iterator[None]:
        before, current[0] = current[0], number
        yield
        current[0] = before

    torch = types.SimpleNamespace(Tensor=TorchTensor, cuda=types.SimpleNamespace(device=device))
    monkeypatch.setitem(sys.modules, "torch", torch)
    for number in range(2):
        memory = DeviceMemory(driver, driver.number(number), 4096)
        (region,) = regions_of([TorchTensor(memory, (4, 8))])
        assert (region.address, region.device, current) == (memory.address, memory.device, [driver.number(0)])


def test_memory_that_was_freed_is_refused(driver: Driver) -> None:
    memory = DeviceMemory(driver, 0, 1 << 20)
    tensor, array = Tensor(memory, (4, 8)), CudaArray(memory, (4, 8))
    memory.free()
    for buffer in (tensor, array):
        with pytest.raises(InvalidError, match="no CUDA device of this process has memory at 0x"):
            regions_of([buffer])


def test_a_tensor_that_names_another_device_is_refused(driver: Driver) -> None:
    memory = DeviceMemory(driver, 0, 4096)
    with pytest.raises(InvalidError, match="says it is on CUDA device 7; its memory is on 0"):
        regions_of([Tensor(memory, (4, 8), device=7)])


def test_element_types_and_shapes_are_checked_against_the_shard(driver: Driver) -> None:
    shard = decode_engine(small_model()).shard(0)
    good = Cache(driver, 0, shard)
    assert all(region.kind is MemoryKind.CUDA for region in regions_of(good.arrays, shard))
    elements = shard.region_bytes[0] // 2
    wrong = Tensor(good.memory[0], (elements,), element="f16")
    with pytest.raises(InvalidError, match="region 0 is an array of f16; the shard keeps f32 there"):
        regions_of([wrong, good.arrays[1]], shard)
    (view,) = shard.regions()[0]
    lengths = [axis.length for axis in view.axes]
    turned = Tensor(good.memory[0], [lengths[0], lengths[1], lengths[3], lengths[2], lengths[4]])
    with pytest.raises(InvalidError, match=r"region 0 .* is an array of shape"):
        regions_of([turned, good.arrays[1]], shard)


def test_a_cache_that_is_partly_on_the_host_has_no_stage(driver: Driver) -> None:
    shard = decode_engine(small_model()).shard(0)
    cache = Cache(driver, 0, shard)
    host = np.zeros(shard.region_bytes[1] // 4, np.float32)
    with Transport("messages") as transport:
        transport.register([cache.arrays[0], host], shard)
        with pytest.raises(UnsupportedError, match="of one kind and device"):
            Stage(transport, shard)


# ---- memory that kvferry gives


class Owner:
    """The object that allocated an array."""

    closed = False


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_an_array_of_a_device_is_a_tensor_to_others(
    driver: Driver, max_version: tuple[int, int] | None
) -> None:
    memory, owner = DeviceMemory(driver, driver.number(1), 4096), Owner()
    array = DeviceArray(owner, memory.address, memory.device, (4, 8), np.float16)  # type: ignore[arg-type]
    assert (array.nbytes, array.__dlpack_device__()) == (64, (2, memory.device))

    class Taker:
        def __dlpack__(self, **options: Any) -> Any:
            return array.__dlpack__(max_version=max_version)

    region = region_of(Taker())
    assert (region.address, region.bytes, region.element) == (memory.address, 64, "f16")
    assert (region.device, region.shape, region.in_order) == (memory.device, (4, 8), True)
    with pytest.raises(BufferError, match="without a copy"):
        array.__dlpack__(copy=True)
    owner.closed = True
    for look in (lambda: array.__dlpack__(), lambda: array.__cuda_array_interface__):
        with pytest.raises(ClosedError, match="Owner that allocated this array was closed"):
            look()


@pytest.mark.parametrize(
    ("dtype", "code", "bits"), [(np.bool_, 6, 8), (np.complex64, 5, 64), (np.uint16, 1, 16)]
)
def test_an_array_of_any_number_is_a_tensor_to_others(driver: Driver, dtype: Any, code: int, bits: int) -> None:
    memory = DeviceMemory(driver, 0, 4096)
    array = DeviceArray(Owner(), memory.address, 0, (4, 8), dtype)  # type: ignore[arg-type]
    capsule = array.__dlpack__(max_version=(1, 0))
    tensor = _look_into(capsule, "DeviceArray")
    assert (tensor.code, tensor.bits, tensor.lanes) == (code, bits, 1)
    with pytest.raises(UnsupportedError, match="no element type for datetime64"):
        DeviceArray(Owner(), memory.address, 0, (4,), "M8[s]").__dlpack__()  # type: ignore[arg-type]


def test_an_array_keeps_its_owner(driver: Driver) -> None:
    memory, owner = DeviceMemory(driver, 0, 4096), Owner()
    array = DeviceArray(owner, memory.address, 0, (4, 8), np.float32)  # type: ignore[arg-type]
    seen = weakref.ref(owner)
    capsule = array.__dlpack__()
    del owner, array
    gc.collect()
    assert seen() is not None
    del capsule
    gc.collect()
    assert seen() is None


def test_memory_of_devices_is_allocated_by_name_or_refused_by_name(driver: Driver) -> None:
    for kind in ("inproc", "messages"):  # these move no memory of devices
        with Transport(kind) as transport:
            for asked in (
                {"device": "cuda:0"},
                {"device": "cuda"},
                {"kind": MemoryKind.CUDA},
                {"kind": 1},
                {"kind": MemoryKind.CUDA, "device": np.int64(0)},
            ):
                with pytest.raises(UnsupportedError, match="no transport here moves CUDA memory"):
                    transport.allocate((4, 8), np.float16, **asked)
            assert isinstance(transport.allocate(64, device="cpu"), np.ndarray)
            with pytest.raises(InvalidError, match='device is "gpu:0"; allowed: '):
                transport.allocate(64, device="gpu:0")
            with pytest.raises(InvalidError, match=r"kind is 7; allowed: .*MemoryKind\.CUDA: 1"):
                transport.allocate(64, kind=7)  # type: ignore[call-overload]


@pytest.mark.skipif(
    "cuda" not in transport_kinds(), reason="no kind of transport has memory of devices to give"
)
@pytest.mark.parametrize("how", ["plain", "exportable"])
def test_memory_of_devices_is_allocated_by_the_transport_that_can(driver: Driver, how: str) -> None:
    with Transport(settings={"cuda.allocation": how}) as transport:
        array = transport.allocate((4, 8), np.float16, device=f"cuda:{driver.number(1)}")
        assert isinstance(array, DeviceArray)
        region = region_of(array)
        assert (region.device, region.bytes, region.element) == (driver.number(1), 64, "f16")
        transport.register([array], withheld=False)
        by_number = transport.allocate(np.int64(64), kind=1)  # type: ignore[call-overload]
        assert isinstance(by_number, DeviceArray) and by_number.shape == (64,)
    with pytest.raises(ClosedError):
        region_of(array)


@pytest.mark.skipif("cuda" not in transport_kinds(), reason="no kind of transport has memory of devices")
@pytest.mark.parametrize("kind", ["transport", "agent"])
def test_an_owner_that_registers_its_own_memory_of_devices_can_be_forgotten(driver: Driver, kind: str) -> None:
    engine = decode_engine(small_model())
    owner = Transport() if kind == "transport" else Agent(engine)
    arrays = [owner.allocate(size, device="cuda:0") for size in engine.shard(0).region_bytes]
    owner.register(arrays)
    seen = weakref.ref(owner)
    del owner, arrays
    gc.collect()
    assert seen() is None


# ---- moving


@pytest.mark.parametrize("transport", ["auto", "shm", "messages"])
@pytest.mark.parametrize("by_dlpack", [True, False])
def test_a_request_goes_from_device_to_device(driver: Driver, transport: str, by_dlpack: bool) -> None:
    prefill, decode = prefill_engine(small_model(), tp_size=1), decode_engine(small_model())
    theirs = Cache(driver, 0, prefill.shard(0), by_dlpack=by_dlpack)
    ours = Cache(driver, 1, decode.shard(0), by_dlpack=by_dlpack)
    theirs.fill(PREFILL_TABLE)
    cells = ours.wrong(DECODE_TABLE)
    assert cells > 0
    with Agent(prefill, transport=transport) as producer, Agent(decode, transport=transport) as consumer:
        producer.register(theirs.arrays)
        consumer.register(ours.arrays)
        for spoiled in (False, True):
            if spoiled:  # proves that the comparison finds wrong bytes
                theirs.spoil()
            name = f"request {spoiled}"
            producer.hold(name, [GroupSteps(PREFILL_TABLE, 0, TOKENS)])
            consumer.pull(name, producer.contact, [GroupSteps(DECODE_TABLE, 0, TOKENS)])
            event = consumer.wait_event(30)
            assert event is not None and event.kind is EventKind.DONE, event
            assert event.bytes_packed == (0 if transport == "auto" else event.bytes)
            assert ours.wrong(DECODE_TABLE) == (cells // 2 if spoiled else 0)


@pytest.mark.skipif("ucx" not in transport_kinds(), reason="this build has no UCX")
def test_a_request_goes_from_device_to_device_by_a_ucx_that_knows_cuda(driver: Driver) -> None:
    if devices()[0].name.startswith("stand-in"):
        pytest.skip("UCX calls more of the driver than the stand-in has")
    prefill, decode = prefill_engine(small_model(), tp_size=1), decode_engine(small_model())
    theirs, ours = Cache(driver, 0, prefill.shard(0)), Cache(driver, 1, decode.shard(0))
    theirs.fill(PREFILL_TABLE)
    cells = ours.wrong(DECODE_TABLE)
    direct = {"ucx.emulated": "on"}  # also where UCX has no RDMA
    try:
        producer = Agent(prefill, transport="ucx", settings=direct)
    except UnsupportedError as error:
        pytest.skip(f"UCX does not work here: {error}")
    with producer, Agent(decode, transport="ucx", settings=direct) as consumer:
        try:
            producer.register(theirs.arrays, withheld=False)
        except UnsupportedError as error:
            pytest.skip(f"UCX takes no memory of devices here: {error}")
        consumer.register(ours.arrays, withheld=False)
        for spoiled in (False, True):
            if spoiled:
                theirs.spoil()
            name = f"request {spoiled}"
            producer.hold(name, [GroupSteps(PREFILL_TABLE, 0, TOKENS)])
            consumer.pull(name, producer.contact, [GroupSteps(DECODE_TABLE, 0, TOKENS)])
            event = consumer.wait_event(30)
            assert event is not None and event.kind is EventKind.DONE, event
            assert event.bytes > 0 and event.bytes_packed == 0
            assert ours.wrong(DECODE_TABLE) == (cells // 2 if spoiled else 0)


@pytest.mark.parametrize("choice", ["withheld", "shown", "cannot be shared"])
def test_memory_of_devices_is_withheld_where_it_must_be(
    driver: Driver, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = prefill_engine(small_model(), tp_size=1)
    cache = Cache(driver, 0, prefill.shard(0))
    asked: list[bool | None] = []

    def memory_array_noted(regions: list[Any], withheld: bool | None) -> Any:
        asked.append(withheld)
        if choice == "cannot be shared" and withheld is False:
            raise UnsupportedError("the driver cannot share this memory")
        return memory_array(regions, withheld)

    monkeypatch.setattr("kvferry.agent.memory_array", memory_array_noted)
    with Agent(prefill) as agent:
        if choice == "cannot be shared":
            with pytest.warns(RuntimeWarning, match="moves packed, through the host: .*cannot share"):
                agent.register(cache.arrays)
        else:
            agent.register(cache.arrays, withheld=True if choice == "withheld" else None)
    assert asked == {"withheld": [True], "shown": [False], "cannot be shared": [False, True]}[choice]


class Recorded:
    """Like a torch.cuda.Event, recorded on an idle stream."""

    def __init__(self, driver: Driver, number: int) -> None:
        event, stream = ctypes.c_void_p(), ctypes.c_void_p()
        driver.on(number, "cuEventCreate", ctypes.byref(event), 2)
        driver.on(number, "cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        driver.on(number, "cuEventRecord", event, stream)
        driver.on(number, "cuStreamDestroy_v2", stream)
        self.cuda_event = event.value or 0
        self.device = types.SimpleNamespace(type="cuda", index=number)

    def destroy(self, driver: Driver) -> None:
        driver.on(self.device.index, "cuEventDestroy_v2", ctypes.c_void_p(self.cuda_event))


@pytest.mark.parametrize("form", ["torch.cuda.Event", "torch.Event", "handle"])
def test_a_hold_may_wait_for_an_event_of_a_stream(driver: Driver, form: str) -> None:
    prefill, decode = prefill_engine(small_model(), tp_size=1), decode_engine(small_model())
    theirs, ours = Cache(driver, 0, prefill.shard(0)), Cache(driver, 1, decode.shard(0))
    theirs.fill(PREFILL_TABLE)
    event = Recorded(driver, driver.number(1))
    forms: dict[str, Any] = {
        "torch.cuda.Event": event,
        "torch.Event": types.SimpleNamespace(event_id=event.cuda_event, device=event.device),
        "handle": CudaEvent(event.cuda_event, event.device.index),
    }
    after = forms[form]
    with Agent(prefill, transport="shm") as producer, Agent(decode, transport="shm") as consumer:
        producer.register(theirs.arrays)
        consumer.register(ours.arrays)
        with pytest.raises(InvalidError, match="record it first"):
            producer.hold("r", [GroupSteps(PREFILL_TABLE, 0, TOKENS)], after=CudaEvent(0))
        with pytest.raises(OutOfRangeError, match="CUDA device 99"):
            producer.hold("r", [GroupSteps(PREFILL_TABLE, 0, TOKENS)], after=CudaEvent(event.cuda_event, 99))
        elsewhere = types.SimpleNamespace(event_id=1, device=types.SimpleNamespace(type="xpu", index=0))
        with pytest.raises(InvalidError, match=r"after is an event of device .*xpu"):
            producer.hold("r", [GroupSteps(PREFILL_TABLE, 0, TOKENS)], after=elsewhere)
        producer.hold("r", [GroupSteps(PREFILL_TABLE, 0, TOKENS)], after=after)
        event.destroy(driver)
        consumer.pull("r", producer.contact, [GroupSteps(DECODE_TABLE, 0, TOKENS)])
        done = consumer.wait_event(30)
        assert done is not None and done.kind is EventKind.DONE, done
        assert ours.wrong(DECODE_TABLE) == 0


class Waiting:
    """Like a torch.cuda.Stream; counts what it has passed by events behind each wait."""

    def __init__(self, driver: Driver, number: int) -> None:
        stream = ctypes.c_void_p()
        driver.on(number, "cuStreamCreateWithPriority", ctypes.byref(stream), 1, -1)
        self.driver, self.cuda_stream = driver, stream.value or 0
        self.device = types.SimpleNamespace(type="cuda", index=number)
        self.events: list[ctypes.c_void_p] = []

    def record(self) -> None:
        event = ctypes.c_void_p()
        self.driver.on(self.device.index, "cuEventCreate", ctypes.byref(event), 2)
        self.driver.on(self.device.index, "cuEventRecord", event, ctypes.c_void_p(self.cuda_stream))
        self.events.append(event)

    def passed(self) -> int:
        return sum(self.driver.is_over(self.device.index, event) for event in self.events)

    def destroy(self) -> None:
        for event in self.events:
            self.driver.on(self.device.index, "cuEventDestroy_v2", event)
        self.driver.on(self.device.index, "cuStreamDestroy_v2", ctypes.c_void_p(self.cuda_stream))


class ElsewhereStream:
    """Like a torch.Stream of a device that is not CUDA's, and gives no handle."""

    device = type("device", (), {"type": "xpu", "index": 1, "__str__": lambda _: "xpu:1"})()

    @property
    def native_handle(self) -> int:
        raise RuntimeError("no handle")


def wait_until(count: Callable[[], int], wanted: int) -> None:
    deadline = time.monotonic() + 20
    while count() < wanted:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def garbage_left_alone() -> Iterator[None]:
    """Memory that a test before has left in a cycle, as tracebacks do, is freed before this one, not during it.

    The collector runs at any time, on any thread. To free memory of a device, a driver may keep its lock until
    no stream waits, and the agent needs that lock to let streams go on.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("garbage_left_alone")
@pytest.mark.parametrize("form", ["torch.cuda.Stream", "torch.Stream", "handle"])
def test_a_stream_passes_as_layers_arrive(driver: Driver, form: str) -> None:
    prefill, decode = prefill_engine(small_model(), tp_size=1), decode_engine(small_model())
    theirs, ours = Cache(driver, 0, prefill.shard(0)), Cache(driver, 1, decode.shard(0))
    theirs.fill(PREFILL_TABLE)
    waiting = Waiting(driver, driver.number(1))
    forms: dict[str, Any] = {
        "torch.cuda.Stream": waiting,
        "torch.Stream": types.SimpleNamespace(native_handle=waiting.cuda_stream, device=waiting.device),
        "handle": CudaStream(waiting.cuda_stream, waiting.device.index),
    }
    stream = forms[form]
    layers = small_model().layer_count
    assert layers >= 2
    with (
        Agent(prefill, transport="shm") as producer,
        Agent(decode, transport="shm") as consumer,
    ):
        producer.register(theirs.arrays)
        consumer.register(ours.arrays)
        steps = [GroupSteps(DECODE_TABLE, 0, TOKENS)]
        ticket = consumer.expect("r", producer.contact, steps, way=Way.PACKED, by_layer=True)
        push = producer.push("r", [GroupSteps(PREFILL_TABLE, 0, TOKENS)])
        for layer in range(layers):
            consumer.let_wait(ticket, layer + 1, stream)
            waiting.record()
        assert not gc.isenabled()
        assert (consumer.arrived(ticket), waiting.passed()) == (0, 0)
        for layer in range(1, layers):
            producer.push_ready(push, (0, TOKENS), layers=layer)
            wait_until(waiting.passed, layer)
            assert waiting.passed() == layer
            assert consumer.arrived(ticket) == layer
        producer.push_ready(push)
        wait_until(waiting.passed, layers)
        done = consumer.wait_event(30)
        assert done is not None and done.kind is EventKind.DONE, done
        assert ours.wrong(DECODE_TABLE) == 0
        with pytest.raises(NotFoundError, match="ticket"):
            consumer.arrived(ticket)
        consumer.let_wait(ticket, 1, stream)  # nothing is left to wait for
        with pytest.raises(NotFoundError, match="12345"):
            consumer.let_wait(12345, 1, stream)
        with pytest.raises(InvalidError, match=r"stream is a ElsewhereStream of device xpu:1; allowed: "):
            consumer.let_wait(ticket, 1, ElsewhereStream())
        other = consumer.expect("s", producer.contact, steps)
        with pytest.raises(InvalidError, match="by_layer"):
            consumer.let_wait(other, 1, stream)
        consumer.cancel(other)
    waiting.destroy()


class Stages:
    """A stage of a prefill rank on the first device, and one of a decode rank on the second.

    `on_host`: the rank whose cache is in memory of the host instead. `shown`: peers are given the memory. The
    options apply to both stages.
    """

    def __init__(
        self, driver: Driver, kind: str, on_host: str = "neither", *, shown: bool = False, **options: Any
    ) -> None:
        self.decode, self.prefill = decode_engine(small_model()), prefill_engine(small_model(), tp_size=1)
        self.on_host = on_host
        self.caches = {
            "prefill": Cache(driver, 0, self.prefill.shard(0)),
            "decode": Cache(driver, 1, self.decode.shard(0)),
        }
        self.caches["prefill"].fill(PREFILL_TABLE)
        self.plain = {name: [memory.read() for memory in cache.memory] for name, cache in self.caches.items()}
        self.transports, self.stages = {}, {}
        for name, cache in self.caches.items():
            transport = self.transports[name] = Transport(kind, name=name)
            memory = self.plain[name] if name == on_host else cache.arrays
            transport.register(memory, cache.shard, withheld=False if shown else None)
            self.stages[name] = Stage(transport, cache.shard, **options)
        self.there = self.transports["decode"].connect(self.transports["prefill"].card)
        here = self.transports["prefill"].connect(self.transports["decode"].card)
        self.stages["decode"].join(self.there)
        self.stages["prefill"].join(here)

    def wrong(self) -> int:
        if self.on_host == "decode":
            return len(wrong_cells(self.decode.shard(0), self.plain["decode"], DECODE_TABLE))
        return self.caches["decode"].wrong(DECODE_TABLE)

    def pull(self, way: Way) -> None:
        """All must go packed."""
        plan = Plan(self.decode.shard(0), self.prefill)
        request = Request(plan, [GroupRequest(DECODE_TABLE, PREFILL_TABLE, 0, TOKENS)])
        assert self.wrong() > 0
        with self.stages["decode"].pull(request, [self.there], way=way) as move:
            deadline = time.monotonic() + 20
            while move.status == Status.IN_PROGRESS:
                assert time.monotonic() < deadline
                for transport in self.transports.values():
                    transport.progress()
            assert (move.status, move.packed) == (Status.OK, 1)
        assert self.wrong() == 0

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()


@pytest.mark.parametrize("on_host", ["neither", "prefill", "decode"])
def test_stages_move_between_devices_and_hosts(driver: Driver, on_host: str) -> None:
    pair = Stages(driver, "shm", on_host)
    pair.pull(Way.AUTO)
    pair.close()


def test_a_stage_has_an_arena_on_its_device_where_the_transport_takes_that(driver: Driver) -> None:
    pair = Stages(driver, "auto", shown=True, device_arena_bytes=16 * 4096, slot_bytes=4096)
    pair.pull(Way.PACKED)
    for stage in pair.stages.values():
        assert (stage.info.device_slots, stage.info.device_flows) == (16, 1)
    pair.close()


@pytest.mark.parametrize("least", [1, None])
def test_runs_may_be_copied_by_the_driver_or_by_kernels(driver: Driver, least: int | None) -> None:
    pair = Stages(driver, "shm", device_copy_bytes=least)
    pair.pull(Way.AUTO)
    pair.close()


def test_a_stage_may_do_without_an_arena_on_its_device(driver: Driver) -> None:
    pair = Stages(driver, "auto", device_arena_bytes=None)
    pair.pull(Way.AUTO)
    for stage in pair.stages.values():
        assert (stage.info.device_slots, stage.info.device_flows) == (0, 0)
    pair.close()
