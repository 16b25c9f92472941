// cuda: the GPU's side of the library: whether its kernels run here, memory and streams for checks and benchmarks, and the
// launch of a kernel.
//
// A program that links the library statically gets the images of the mechanisms that it calls, and no others.
//
// The library needs neither a driver nor CUDA's own libraries to be built, linked or started: kernels are compiled ahead of
// time into images (cubin) that the library carries, and the driver is looked for when a call first asks. Without nvcc there
// are no images, and everything here says so.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/launch.h"
#include "core/status.h"

namespace linnet::cuda {

// Empty when this build's kernels run on this machine's GPU, else the reason why not.
std::string missing();
std::string device_name();   // "NVIDIA H200"; empty without one
int multiprocessor_count();  // of the current device, 0 without one

// Makes the device that owns `pointer` current while it lives.
class Scope {
 public:
  explicit Scope(const void* pointer);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  Status status() const;

 private:
  void* before_ = nullptr;
  bool changed_ = false;
  const char* error_ = nullptr;
};

// A kernel of an image; `image` is the path of its source below src/mechanisms (or src) without .cu.
struct Kernel {
  const char* image;
  const char* name;
  int threads;
  int shared_bytes = 0;
  int cluster = 1;  // blocks of a cluster, as its source declares them; more than 8 do not fit on every GPU
};
struct Grid {
  int64_t x = 1, y = 1, z = 1;
};
// Clusters of a kernel that run at the same time on the current device; 0 where it has no room for one, or without a device.
int clusters_at_a_time(const Kernel& kernel);
// A kernel's parameters: where each lies, and its bytes.
struct Parameters {
  void** data;
  const size_t* bytes;
  int count;
};
// Enqueues a kernel on launch.stream. A failure is left in launch.error, and the launches behind it do nothing.
void enqueue(const Launch& launch, const Kernel& kernel, const Grid& grid, const Parameters& parameters);

// Enqueues a kernel with these parameters, which must have the types that the kernel declares: launches_test.cc compares their
// sizes with those in the image.
template <class... Types>
void enqueue(const Launch& launch, const Kernel& kernel, const Grid& grid, const Types&... parameters) {
  void* data[] = {const_cast<void*>(static_cast<const void*>(&parameters))...};
  const size_t bytes[] = {sizeof(Types)...};
  enqueue(launch, kernel, grid, Parameters{data, bytes, sizeof...(Types)});
}

// A launch without a GPU: while a Recording lives, the calls of its thread run as if there were one (an H200 with 132
// multiprocessors) whose kernels are written down instead. Tests learn from it what a call would launch.
struct Recorded {
  std::string image, name;
  int threads, shared_bytes, cluster;
  Grid grid;
  std::vector<size_t> parameters;  // bytes of each
};
class Recording {
 public:
  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  std::vector<Recorded> launches;

 private:
  Recording* outer_;
};
bool is_recording();  // in this thread: what does not go through enqueue must not run

// A tile's description for the tensor memory accelerator, passed to kernels by value.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};
// `rank` dimensions, the fastest first; strides in bytes of all dimensions but the first. 16-bit elements, boxes of 128-byte
// rows with the 128-byte swizzle; what lies outside of the tensor reads as zero.
bool encode_tensor_map(TensorMap* map, Dtype dtype, const void* data, int rank, const uint64_t* size, const uint64_t* stride,
                       const uint32_t* box);

// Memory on the current device, and a stream; for checks, benchmarks and tests. Failures are sentences.
Status allocate(int64_t bytes, void** memory);
void release(void* memory);
Status copy_to_device(void* device, const void* host, int64_t bytes);
Status copy_to_host(void* host, const void* device, int64_t bytes);
Status copy_on_device(void* to, const void* from, int64_t bytes);
Status synchronize();

// Moments of the default stream.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record();
  double seconds_since(const Event& earlier) const;  // waits for this one

 private:
  void* event_ = nullptr;
};

}  // namespace linnet::cuda

// Stands once, outside of any namespace, in a source that launches kernels of the images below that folder of src/mechanisms
// (or src): it brings them into the program (cmake/cuda.cmake).
#define LINNET_USES_IMAGES(folder)                                             \
  extern "C" const char* const linnet_images_##folder[];                       \
  namespace {                                                                  \
  [[gnu::used]] const void* const images_of_##folder = linnet_images_##folder; \
  }
