// src/ptx/sync.cuh on the emulated GPU. Fences order nothing here: a thread sees what others wrote before it went on.
#pragma once

#include <cstdint>

namespace linnet::ptx {

inline uint32_t shared_address(const void* pointer) { return emulate::shared_address(pointer); }

template <class T>
T& shared_as(char* memory) {
  return *reinterpret_cast<T*>(memory + (-shared_address(memory) & 1023));
}

inline void barrier_init(uint64_t* barrier, uint32_t count) { emulate::phases_init(barrier, count); }
inline void barrier_init_fence() {}
inline void barrier_arrive(uint64_t* barrier) { emulate::phases_arrive(barrier, 0); }
inline void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) { emulate::phases_arrive(barrier, bytes); }
inline void barrier_wait(uint64_t* barrier, uint32_t parity) { emulate::phases_wait(barrier, parity); }

inline uint32_t load_acquire(const uint32_t* counter) {
  emulate::pause();  // who asks again and again lets the others go on
  return *static_cast<const volatile uint32_t*>(counter);
}

inline bool elect() {
  emulate::meet("elect.sync", 0xffffffffu, {}, nullptr);
  return emulate::lane() == 0;
}

template <int id, int threads>
void group_sync() {
  emulate::barrier(id, threads, false);
}
template <int id, int threads>
void group_arrive() {
  emulate::barrier_arrive(id, threads);
}
template <int id, int threads>
bool group_any(bool mine) {
  return emulate::barrier(id, threads, mine);
}

inline void fence_async_shared() {}

inline void forget(int&) {}
inline void forget(uint32_t&) {}

template <int count>
void more_registers() {}
template <int count>
void fewer_registers() {}

}  // namespace linnet::ptx
