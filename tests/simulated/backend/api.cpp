// What Python asks the machine, by ctypes: it must work under any mode of torch's, and wait for a lock without Python's.
#include <cstring>

#include "device.h"

using namespace simulated;

extern "C" {

int sim_device_count() { return kDevices; }
int64_t sim_device_bytes() { return kDeviceBytes; }

void sim_set_device_bytes(int64_t bytes, int device) {
  Lock lock(machine().mutex);
  machine().of(device).bytes = bytes;
}

void sim_set_sync_debug_mode(int mode) { sync_debug_mode = mode; }
void sim_host_tells(uint64_t channel) { machine().host_tells(channel); }
void sim_host_hears(uint64_t channel) { machine().host_hears(channel); }
void sim_set_host_ahead(int is_ahead) { machine().set_host_ahead(is_ahead); }
void sim_forget() { machine().forget_all_orders(); }

// The races since it was last asked, a line each, as far as there is room.
void sim_take_races(char* text, size_t room) {
  std::string all;
  for (const auto& race : machine().take_races()) all += race + "\n";
  std::strncpy(text, all.c_str(), room - 1);
}

int64_t sim_count(const char* what) {
  Lock lock(machine().mutex);
  const auto& counts = machine().counts();
  const auto place = counts.find(what);
  return place == counts.end() ? 0 : place->second;
}

}  // extern "C"
