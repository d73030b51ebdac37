// A machine with several accelerators that are none: what they compute is computed at once, by the CPU, in the CPU's
// memory. What is simulated is the order that streams and events promise.
//
// A kernel or copy that is given to a stream would run some time later on a real device. Here it runs when it is given,
// so its result is always there; whether somebody was allowed to rely on that is told by vector clocks. A stream's
// clock says, for each stream, how many of its operations come before whatever the stream is given next. Every block of
// memory remembers who has read and written it since when; an access that does not come behind the ones that it
// conflicts with is a race, in whichever order the host has called things this time.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace simulated {

inline constexpr auto kType = c10::DeviceType::PrivateUse1;
inline constexpr int kDevices = 4;
inline constexpr int kStreams = 33;  // of a device: the default one, and a pool from which new ones are dealt, as CUDA's
inline constexpr int kQueues = kDevices * kStreams;
inline constexpr int64_t kDeviceBytes = int64_t{1} << 34;  // of each device, unless a test says otherwise

// A stream of any of the devices.
using Queue = int;
inline constexpr Queue kNobody = -1;

inline Queue queue_of(const c10::Stream& stream) {
  return stream.device_index() * kStreams + static_cast<int>(stream.id());
}
std::string name_of(Queue queue);

// -- what each thread of the host has chosen ---------------------------------------------------------------------------

int current_device();
int exchange_device(int device);  // returns the one before
Queue current_queue(int device);
Queue exchange_queue(Queue queue);  // returns the one before, of the same device

// -- clocks ------------------------------------------------------------------------------------------------------------

struct Clock {
  std::array<uint32_t, kQueues> ticks{};

  void join(const Clock& other) {
    for (int queue = 0; queue < kQueues; queue++)
      ticks[queue] = std::max(ticks[queue], other.ticks[queue]);
  }
  bool covers(const Clock& other) const {
    for (int queue = 0; queue < kQueues; queue++)
      if (ticks[queue] < other.ticks[queue]) return false;
    return true;
  }
};

// One operation of a stream.
struct Operation {
  Queue queue;
  uint32_t tick;
  const char* name;  // lives for ever
};

struct Event {
  Clock clock;
  Queue queue = kNobody;  // not recorded yet: nobody waits for it
  bool has_time = false;
  double seconds = 0;
  int times_asked = 0;  // whether it has passed
};

// -- memory ------------------------------------------------------------------------------------------------------------

// Bytes of a block, counted from its beginning.
struct Range {
  size_t from = 0, to = 0;

  bool overlaps(const Range& other) const { return from < other.to && other.from < to; }
  bool contains(const Range& other) const { return from <= other.from && other.to <= to; }
};

struct Access {
  Operation by;
  Range range;
  bool writes;
};

struct Block {
  size_t size;
  Queue pool;  // the stream that was current where it was taken; kNobody for pinned memory of the host
  std::vector<Access> accesses;
  std::vector<Queue> recorded;  // by record_stream
};

// Memory of the caching allocator that is given back, but not to be used again before streams have come so far.
struct Delayed {
  size_t size;
  Queue pool;
  Clock until;
};

struct DeviceMemory {
  int64_t bytes = kDeviceBytes;
  int64_t allocated = 0, allocated_peak = 0;
  int64_t reserved = 0, reserved_peak = 0;
  std::array<int64_t, kStreams> cached{};  // reserved and free, by stream
  std::vector<Delayed> delayed;
};

// What a stream does to the host's memory. It happens when the host has waited for it.
struct HostEffect {
  uint32_t tick;
  const void* written;  // the pinned block; null where the memory is only read
  std::function<void()> apply;
};

// -- the machine -------------------------------------------------------------------------------------------------------

// All methods lock the mutex, which must not be held while Python code may run.
class Machine {
 public:
  std::recursive_mutex mutex;

  // Streams.
  Operation begin(Queue queue, const char* name);  // the next operation of a stream
  void wait(Queue queue, const Clock& clock);
  Clock clock_of(Queue queue);
  Queue new_queue(int device);

  // The host. Each thread knows what it has waited for itself, and what threads knew that it has heard of.
  void host_waits(const Clock& clock);
  bool host_knows(const Clock& clock);  // some thread of it
  void host_tells(uint64_t channel);
  void host_hears(uint64_t channel);
  void after(const Operation& operation, const void* written, std::function<void()> effect);
  void bring_up_to_date(const void* pinned);  // for a device that reads it
  bool has_passed(const Clock& clock, int& times_asked);
  void set_host_ahead(bool is_ahead);

  // Accesses. They return whether it was ordered behind all that it conflicts with.
  bool read(const void* memory, Range range, const Operation& by);
  bool write(const void* memory, Range range, const Operation& by);

  // Memory.
  void take(void* memory, size_t size, int device);
  void give_back(void* memory);
  void record_stream(const void* memory, Queue queue);
  void* base_of(const void* memory);  // null: unknown
  void empty_cache();
  DeviceMemory& of(int device) { return devices_[device]; }

  std::shared_ptr<void> pinned(const void* memory);  // the block, to be held; null where it is not pinned
  void* take_pinned(size_t size);
  void give_back_pinned(void* memory);

  // What has happened.
  void report(const char* kind, const std::string& text);
  std::vector<std::string> take_races();
  void count(const std::string& what, int64_t by = 1) { counts_[what] += by; }
  std::map<std::string, int64_t>& counts() { return counts_; }

  void forget_all_orders();

 private:
  Block* find(const void* memory);
  const Clock& host_clock();
  void apply_effects(Queue queue, const std::function<bool(const HostEffect&)>& is_due);
  bool comes_behind(Queue queue, const Operation& earlier);
  void reuse_delayed(int device);

  std::array<Clock, kQueues> clocks_{};
  Clock host_{};  // what any thread of the host knows
  std::map<uint64_t, Clock> channels_;
  std::array<std::vector<HostEffect>, kQueues> effects_;
  std::map<uintptr_t, Block> blocks_;
  std::map<uintptr_t, std::shared_ptr<void>> pinned_;
  std::array<DeviceMemory, kDevices> devices_{};
  std::array<int, kDevices> streams_made_{};
  std::vector<std::string> races_;
  std::map<std::string, int64_t> counts_;
  std::mt19937 dice_{1};
  bool is_host_ahead_ = false;
};

Machine& machine();

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace simulated
