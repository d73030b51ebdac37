// Clocks, memory and races: all that is simulated. It knows nothing of tensors.
#include "machine.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include <c10/util/Exception.h>

namespace simulated {

Machine& machine() {
  static Machine* const the_machine = new Machine();  // never destroyed: threads may outlive static objects
  return *the_machine;
}

std::string name_of(Queue queue) {
  const auto stream = queue % kStreams;
  return "sim:" + std::to_string(queue / kStreams) + (stream ? " stream " + std::to_string(stream) : " default stream");
}

// -- what each thread of the host has chosen ---------------------------------------------------------------------------

namespace {

thread_local int t_device = 0;
thread_local std::array<int, kDevices> t_stream{};  // by device
thread_local Clock t_host{};

// Autograd's threads, one for each device, hand work to each other by queues in C++ that nobody can listen to. They are
// taken to know what any thread knows, which may hide a race and reports none that is not there.
bool is_engine_thread() {
  static thread_local const bool is_one = [] {
    char name[64] = {};
    pthread_getname_np(pthread_self(), name, sizeof name);
    return std::strncmp(name, "pt_autograd", 11) == 0;
  }();
  return is_one;
}

}  // namespace

int current_device() { return t_device; }

int exchange_device(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "invalid device ordinal ", device, ": there are ", kDevices);
  return std::exchange(t_device, device);
}

Queue current_queue(int device) { return device * kStreams + t_stream[device]; }

Queue exchange_queue(Queue queue) {
  const auto device = queue / kStreams;
  return device * kStreams + std::exchange(t_stream[device], queue % kStreams);
}

// -- streams -----------------------------------------------------------------------------------------------------------

Operation Machine::begin(Queue queue, const char* name) {
  Lock lock(mutex);
  clocks_[queue].join(host_clock());  // it is given now, so it comes after all that this thread has waited for
  return {queue, ++clocks_[queue].ticks[queue], name};
}

void Machine::wait(Queue queue, const Clock& clock) {
  Lock lock(mutex);
  clocks_[queue].join(clock);
}

Clock Machine::clock_of(Queue queue) {
  Lock lock(mutex);
  return clocks_[queue];
}

Queue Machine::new_queue(int device) {
  Lock lock(mutex);
  return device * kStreams + 1 + streams_made_[device]++ % (kStreams - 1);
}

// -- the host ----------------------------------------------------------------------------------------------------------

const Clock& Machine::host_clock() { return is_engine_thread() ? host_ : t_host; }

void Machine::host_waits(const Clock& clock) {
  Lock lock(mutex);
  t_host.join(clock);
  host_.join(clock);
  for (Queue queue = 0; queue < kQueues; queue++)
    if (!effects_[queue].empty())
      apply_effects(queue, [&](const HostEffect& effect) { return effect.tick <= clock.ticks[queue]; });
}

bool Machine::host_knows(const Clock& clock) {
  Lock lock(mutex);
  return host_.covers(clock);
}

void Machine::host_tells(uint64_t channel) {
  Lock lock(mutex);
  channels_[channel].join(host_clock());
}

void Machine::host_hears(uint64_t channel) {
  Lock lock(mutex);
  const auto told = channels_.find(channel);
  if (told != channels_.end()) t_host.join(told->second);
}

void Machine::after(const Operation& operation, const void* written, std::function<void()> effect) {
  Lock lock(mutex);
  effects_[operation.queue].push_back({operation.tick, written, std::move(effect)});
}

void Machine::bring_up_to_date(const void* pinned) {
  Lock lock(mutex);
  for (Queue queue = 0; queue < kQueues; queue++)
    apply_effects(queue, [&](const HostEffect& effect) { return effect.written == pinned; });
}

void Machine::apply_effects(Queue queue, const std::function<bool(const HostEffect&)>& is_due) {
  auto& waiting = effects_[queue];
  const auto later = std::stable_partition(waiting.begin(), waiting.end(), is_due);
  for (auto effect = waiting.begin(); effect != later; ++effect) effect->apply();
  waiting.erase(waiting.begin(), later);
}

// What nobody has waited for is over, or is not: who asks must cope with both. So chance answers, or else a device that
// is far behind: then only who asks for long hears that it is over.
bool Machine::has_passed(const Clock& clock, int& times_asked) {
  constexpr int kLong = 20;
  Lock lock(mutex);
  const bool is_over = host_knows(clock) || (is_host_ahead_ ? ++times_asked > kLong : dice_() & 1);
  if (is_over) host_waits(clock);
  return is_over;
}

void Machine::set_host_ahead(bool is_ahead) {
  Lock lock(mutex);
  is_host_ahead_ = is_ahead;
}

// -- accesses ----------------------------------------------------------------------------------------------------------

bool Machine::comes_behind(Queue queue, const Operation& earlier) {
  return queue == earlier.queue || clocks_[queue].ticks[earlier.queue] >= earlier.tick;
}

Block* Machine::find(const void* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return nullptr;
  auto& [begin, block] = *--next;
  return address < begin + std::max<size_t>(block.size, 1) ? &block : nullptr;
}

namespace {

// A read by the same stream as an earlier one of the same bytes tells all that the earlier one did.
void note(Block& block, const Access& access) {
  auto& all = block.accesses;
  const auto is_superseded = [&](const Access& earlier) {
    return access.range.contains(earlier.range) &&
        (access.writes || (!earlier.writes && earlier.by.queue == access.by.queue));
  };
  all.erase(std::remove_if(all.begin(), all.end(), is_superseded), all.end());
  all.push_back(access);
}

}  // namespace

bool Machine::read(const void* memory, Range range, const Operation& by) {
  Lock lock(mutex);
  Block* block = find(memory);
  if (!block || range.from == range.to) return true;
  bool is_ordered = true;
  for (const auto& earlier : block->accesses)
    if (earlier.writes && earlier.range.overlaps(range) && !comes_behind(by.queue, earlier.by)) {
      is_ordered = false;
      report("read too early", std::string(by.name) + " on " + name_of(by.queue) + " does not wait for " +
          earlier.by.name + " on " + name_of(earlier.by.queue) + ", which writes what it reads");
    }
  note(*block, {by, range, false});
  return is_ordered;
}

bool Machine::write(const void* memory, Range range, const Operation& by) {
  Lock lock(mutex);
  Block* block = find(memory);
  if (!block || range.from == range.to) return true;
  bool is_ordered = true;
  for (const auto& earlier : block->accesses)
    if (earlier.range.overlaps(range) && !comes_behind(by.queue, earlier.by)) {
      is_ordered = false;
      report("written too early", std::string(by.name) + " on " + name_of(by.queue) + " does not wait for " +
          earlier.by.name + " on " + name_of(earlier.by.queue) + ", which " +
          (earlier.writes ? "writes the same memory" : "reads what it overwrites"));
    }
  note(*block, {by, range, true});
  return is_ordered;
}

// -- memory ------------------------------------------------------------------------------------------------------------

namespace {

int64_t rounded(size_t size) { return (static_cast<int64_t>(size) + 511) / 512 * 512; }  // as CUDA's allocator

}  // namespace

void Machine::take(void* memory, size_t size, int device) {
  Lock lock(mutex);
  const auto pool = current_queue(device);
  auto& own = devices_[device];
  reuse_delayed(device);
  blocks_[reinterpret_cast<uintptr_t>(memory)] = Block{size, pool, {}, {}};
  own.allocated += rounded(size);
  own.allocated_peak = std::max(own.allocated_peak, own.allocated);
  auto& cached = own.cached[pool % kStreams];
  const auto reused = std::min(cached, rounded(size));
  cached -= reused;
  own.reserved += rounded(size) - reused;
  own.reserved_peak = std::max(own.reserved_peak, own.reserved);
}

// Memory that is given back goes to the next who asks for some on the same stream, and who then writes to it. Only what
// comes before that on this stream is over by then; and, where record_stream was called, all that the other stream has
// been given up to now.
void Machine::give_back(void* memory) {
  Lock lock(mutex);
  const auto place = blocks_.find(reinterpret_cast<uintptr_t>(memory));
  if (place == blocks_.end()) return;
  const Block block = std::move(place->second);
  blocks_.erase(place);
  const auto is_over = [&](const Operation& by) {
    // Who drops the last reference comes after all who have dropped theirs, whatever thread had waited for what.
    if (comes_behind(block.pool, by) || host_.ticks[by.queue] >= by.tick) return true;
    return std::any_of(block.recorded.begin(), block.recorded.end(), [&](Queue q) { return comes_behind(q, by); });
  };
  for (const auto& access : block.accesses)
    if (!is_over(access.by))
      report("given back too early", "memory of " + name_of(block.pool) + " is given back while " + access.by.name +
          " on " + name_of(access.by.queue) + " may still " + (access.writes ? "write" : "read") + " it");
  auto& own = devices_[block.pool / kStreams];
  own.allocated -= rounded(block.size);
  Clock until;
  for (const auto queue : block.recorded)
    if (queue != block.pool) until.join(clocks_[queue]);
  own.delayed.push_back({block.size, block.pool, until});
  reuse_delayed(block.pool / kStreams);
}

// A host that runs ahead sees an event pass only when it has waited for it.
void Machine::reuse_delayed(int device) {
  auto& own = devices_[device];
  const auto is_over = [&](const Delayed& one) {
    if (!host_.covers(one.until)) return false;
    own.cached[one.pool % kStreams] += rounded(one.size);
    return true;
  };
  own.delayed.erase(std::remove_if(own.delayed.begin(), own.delayed.end(), is_over), own.delayed.end());
}

void Machine::record_stream(const void* memory, Queue queue) {
  Lock lock(mutex);
  if (Block* block = find(memory)) block->recorded.push_back(queue);
}

void* Machine::base_of(const void* memory) {
  Lock lock(mutex);
  const auto address = reinterpret_cast<uintptr_t>(memory);
  auto next = blocks_.upper_bound(address);
  return next != blocks_.begin() && find(memory) ? reinterpret_cast<void*>((--next)->first) : nullptr;
}

void Machine::empty_cache() {
  Lock lock(mutex);
  for (int device = 0; device < kDevices; device++) {
    reuse_delayed(device);
    for (auto& cached : devices_[device].cached) devices_[device].reserved -= std::exchange(cached, 0);
  }
}

// Torch's allocator of pinned memory does not use it again before copies that it has noted are over. So what they read
// and write stays until then: they hold it.
void* Machine::take_pinned(size_t size) {
  void* memory = nullptr;
  TORCH_CHECK(!posix_memalign(&memory, 64, std::max<size_t>(size, 1)), "no pinned memory left");
  std::memset(memory, 0xFF, size);
  Lock lock(mutex);
  const auto address = reinterpret_cast<uintptr_t>(memory);
  pinned_[address] = std::shared_ptr<void>(memory, std::free);
  blocks_[address] = Block{size, kNobody, {}, {}};
  return memory;
}

void Machine::give_back_pinned(void* memory) {
  Lock lock(mutex);
  blocks_.erase(reinterpret_cast<uintptr_t>(memory));
  pinned_.erase(reinterpret_cast<uintptr_t>(memory));
}

std::shared_ptr<void> Machine::pinned(const void* memory) {
  Lock lock(mutex);
  Block* block = find(memory);
  if (!block || block->pool != kNobody) return nullptr;
  const auto place = pinned_.find(reinterpret_cast<uintptr_t>(base_of(memory)));
  return place == pinned_.end() ? nullptr : place->second;
}

// -- what has happened -------------------------------------------------------------------------------------------------

void Machine::report(const char* kind, const std::string& text) {
  Lock lock(mutex);
  const auto line = std::string(kind) + ": " + text;
  counts_[kind]++;
  if (std::find(races_.begin(), races_.end(), line) == races_.end()) races_.push_back(line);
}

std::vector<std::string> Machine::take_races() {
  Lock lock(mutex);
  return std::exchange(races_, {});
}

// Between tests: the host waits for all, and every thread has heard of it.
void Machine::forget_all_orders() {
  Lock lock(mutex);
  Clock all;
  for (const auto& clock : clocks_) all.join(clock);
  host_waits(all);
  for (auto& clock : clocks_) clock.join(all);
  channels_.clear();
  counts_.clear();
  races_.clear();
  for (auto& device : devices_) device.bytes = kDeviceBytes;
}

}  // namespace simulated
