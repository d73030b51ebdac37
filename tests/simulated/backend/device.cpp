// What torch asks of a backend apart from kernels: an allocator, device guards with streams and events, hooks.
#include "device.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simulated {

int sync_debug_mode = 0;

void host_blocks(const char* name) {
  machine().count("host blocks");
  TORCH_CHECK(!sync_debug_mode, "called a synchronizing operation: ", name);
}

namespace {

c10::Device device_at(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

int index_of(const c10::Device& device) { return device.has_index() ? device.index() : current_device(); }

// -- memory ------------------------------------------------------------------------------------------------------------

// What a DataPtr of a device owns: memory of its own, or the storage of a CPU tensor.
struct Owner {
  void* memory;
  c10::Storage adopted;
};

void release(void* context) {
  const std::unique_ptr<Owner> owner(static_cast<Owner*>(context));
  machine().give_back(owner->memory);
  if (!owner->adopted) std::free(owner->memory);
}

void check_room(size_t size, int device) {
  Lock lock(machine().mutex);
  const auto used = machine().of(device).allocated;
  const auto total = machine().of(device).bytes;
  if (static_cast<int64_t>(size) > total - used)
    C10_THROW_ERROR(OutOfMemoryError, "sim:" + std::to_string(device) + " out of memory: tried to allocate " +
        std::to_string(size) + " bytes, " + std::to_string(used) + " of " + std::to_string(total) + " are taken");
}

void fill(c10::CachingAllocator::StatArray& statistic, int64_t current, int64_t peak) {
  statistic[0].current = current;
  statistic[0].peak = peak;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const auto device = current_device();
    if (!size) return {nullptr, device_at(device)};
    check_room(size, device);
    void* memory = nullptr;
    TORCH_CHECK(!posix_memalign(&memory, 64, size), "the host has no memory left");
    std::memset(memory, 0xFF, size);  // NaN: who reads what nobody has written sees it
    machine().take(memory, size, device);
    return {memory, new Owner{memory, {}}, &release, device_at(device)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { machine().empty_cache(); }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    machine().record_stream(memory.get(), queue_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(machine().mutex);
    const auto& own = machine().of(device);
    c10::CachingDeviceAllocator::DeviceStats all;
    for (auto* statistic : {&all.allocated_bytes, &all.active_bytes, &all.requested_bytes})
      fill(*statistic, own.allocated, own.allocated_peak);
    fill(all.reserved_bytes, own.reserved, own.reserved_peak);
    return all;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(machine().mutex);
    auto& own = machine().of(device);
    own.allocated_peak = own.allocated;
    own.reserved_peak = own.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock(machine().mutex);
    const auto total = machine().of(device).bytes;
    return {std::max<int64_t>(0, total - machine().of(device).reserved), total};
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = machine().take_pinned(size);
    const auto release_pinned = [](void* context) { machine().give_back_pinned(context); };
    return {memory, memory, release_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

PinnedAllocator pinned_allocator;

}  // namespace

c10::Allocator* device_allocator() { return &allocator; }

c10::DataPtr adopt(const c10::Storage& storage, int device) {
  void* memory = storage.data_ptr().get();
  if (!memory) return {nullptr, device_at(device)};
  check_room(storage.nbytes(), device);
  machine().take(memory, storage.nbytes(), device);
  return {memory, new Owner{memory, storage}, &release, device_at(device)};
}

void put_memory(const c10::Storage& storage, c10::DataPtr memory, size_t size) {
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

// -- generators --------------------------------------------------------------------------------------------------------

GeneratorImpl::GeneratorImpl(int device)
    : c10::GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      on_cpu(at::detail::createCPUGenerator(c10::default_rng_seed_val)) {}

void GeneratorImpl::set_current_seed(uint64_t seed) {
  on_cpu.set_current_seed(seed);
  offset_ = 0;
}

uint64_t GeneratorImpl::seed() {
  offset_ = 0;
  return on_cpu.seed();
}

// The state is that of the CPU's, and the offset behind it.
void GeneratorImpl::set_state(const c10::TensorImpl& state) {
  const auto bytes = state.numel() - static_cast<int64_t>(sizeof offset_);
  auto own = on_cpu.get_state();
  TORCH_CHECK(bytes == own.numel(), "this is no state of a generator of a simulated device");
  const auto* data = static_cast<const uint8_t*>(state.data());
  std::memcpy(own.data_ptr(), data, bytes);
  std::memcpy(&offset_, data + bytes, sizeof offset_);
  on_cpu.set_state(own);
}

c10::intrusive_ptr<c10::TensorImpl> GeneratorImpl::get_state() const {
  const auto own = on_cpu.get_state();
  // As for the CPU's: no mode of torch's makes another tensor of it.
  const auto size = own.numel() + static_cast<int64_t>(sizeof offset_);
  const at::Tensor state = at::detail::empty_cpu({size}, at::kByte, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
  auto* data = static_cast<uint8_t*>(state.data_ptr());
  std::memcpy(data, own.data_ptr(), own.numel());
  std::memcpy(data + own.numel(), &offset_, sizeof offset_);
  return state.getIntrusivePtr();
}

GeneratorImpl* GeneratorImpl::clone_impl() const {
  auto* copy = new GeneratorImpl(device_.index());
  copy->on_cpu = on_cpu.clone();
  copy->offset_ = offset_;
  return copy;
}

const at::Generator& default_generator(int device) {
  static const auto* const all = [] {
    auto* generators = new std::vector<at::Generator>();
    for (int index = 0; index < kDevices; index++) generators->push_back(at::make_generator<GeneratorImpl>(index));
    return generators;
  }();
  return all->at(device);
}

namespace {

// -- devices, streams, events ------------------------------------------------------------------------------------------

c10::Stream stream_at(Queue queue) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(queue / kStreams), queue % kStreams);
}

Event* event_at(void* event) { return static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return device_at(current_device()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return device_at(exchange_device(index_of(device)));
  }
  void setDevice(c10::Device device) const override { exchange_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange_device(index_of(device)); }

  c10::Stream getStream(c10::Device device) const override { return stream_at(current_queue(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_at(index_of(device) * kStreams); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_at(machine().new_queue(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_at(exchange_queue(queue_of(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    static thread_local int times_asked = 0;
    return machine().has_passed(machine().clock_of(queue_of(stream)), times_asked);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    machine().count("host waits");
    machine().host_waits(machine().clock_of(queue_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    machine().count("host waits");
    for (int stream = 0; stream < kStreams; stream++)
      machine().host_waits(machine().clock_of(index_of(device_at(device)) * kStreams + stream));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag)
      const override {
    if (!*event) *event = new Event();
    Lock lock(machine().mutex);
    auto& own = *event_at(*event);
    own.queue = machine().begin(queue_of(stream), "event").queue;
    own.times_asked = 0;
    own.clock = machine().clock_of(own.queue);
    own.has_time = flag == c10::EventFlag::BACKEND_DEFAULT;
    own.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void block(void* event, const c10::Stream& stream) const override {
    machine().count("waits");
    Lock lock(machine().mutex);
    if (event && event_at(event)->queue != kNobody) machine().wait(queue_of(stream), event_at(event)->clock);
  }
  bool queryEvent(void* event) const override {
    Lock lock(machine().mutex);
    if (!event || event_at(event)->queue == kNobody) return true;
    return machine().has_passed(event_at(event)->clock, event_at(event)->times_asked);
  }
  void synchronizeEvent(void* event) const override {
    machine().count("host waits");
    Lock lock(machine().mutex);
    if (event) machine().host_waits(event_at(event)->clock);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    Lock lock(machine().mutex);
    TORCH_CHECK(first && second && event_at(first)->has_time && event_at(second)->has_time,
        "both events must be recorded, and with enable_timing=True");
    return (event_at(second)->seconds - event_at(first)->seconds) * 1e3;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete event_at(event); }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    machine().record_stream(memory.get(), queue_of(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- hooks -------------------------------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(index_of(device_at(device)));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(index_of(device_at(device)));
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* memory) const override { return machine().pinned(memory) != nullptr; }
  at::Device getDeviceFromPtr(void*) const override { return device_at(current_device()); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard guard(storage.device());
    auto fresh = allocator.allocate(size);
    if (storage.nbytes() && size) std::memcpy(fresh.get(), storage.data(), std::min(size, storage.nbytes()));
    put_memory(storage, std::move(fresh), size);
  }
};

const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
}  // namespace simulated
