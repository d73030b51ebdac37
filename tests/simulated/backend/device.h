// The simulated devices as torch asks for them: memory, streams and events, generators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include "machine.h"

namespace simulated {

c10::Allocator* device_allocator();

// The memory of a CPU storage as memory of a device, which lives as long as it does.
c10::DataPtr adopt(const c10::Storage& storage, int device);

// Replaces the memory of a storage.
void put_memory(const c10::Storage& storage, c10::DataPtr memory, size_t size);

// A generator of a device draws from one of the CPU, whose kernels take no other.
struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(int device);

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return on_cpu.current_seed(); }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  at::Generator on_cpu;
  uint64_t offset_ = 0;  // how often it was drawn from

 private:
  GeneratorImpl* clone_impl() const override;
};

const at::Generator& default_generator(int device);

// Does the host wait for the device within an operation? An error where that was asked for.
void host_blocks(const char* name);
extern int sync_debug_mode;

}  // namespace simulated
