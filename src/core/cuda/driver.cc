#include "core/cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "core/cuda/device.h"
#include "core/cuda/images.h"

namespace linnet::cuda {
namespace {

// The driver's functions that are used here, by their names in libcuda.so.1; the types are those of its header cuda.h.
using Result = int;
using DevicePointer = unsigned long long;
constexpr Result kInvalidValue = 1;
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream = nullptr;
  void* attributes = nullptr;
  unsigned attribute_count = 0;
};

struct Driver {
  Result (*cuInit)(unsigned flags);
  Result (*cuDeviceGetCount)(int* count);
  Result (*cuDeviceGet)(int* device, int ordinal);
  Result (*cuDeviceGetName)(char* name, int length, int device);
  Result (*cuDeviceGetAttribute)(int* value, int attribute, int device);
  Result (*cuDevicePrimaryCtxRetain)(void** context, int device);
  Result (*cuCtxGetCurrent)(void** context);
  Result (*cuCtxSetCurrent)(void* context);
  Result (*cuCtxGetDevice)(int* device);
  Result (*cuCtxSynchronize)();
  Result (*cuModuleLoadData)(void** module, const void* image);
  Result (*cuModuleGetFunction)(void** function, void* module, const char* name);
  Result (*cuFuncSetAttribute)(void* function, int attribute, int value);
  Result (*cuLaunchKernel)(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                           unsigned shared, void* stream, void** parameters, void** extra);
  Result (*cuOccupancyMaxActiveClusters)(int* count, void* function, const LaunchConfig* config);
  Result (*cuMemAlloc_v2)(DevicePointer* pointer, size_t bytes);
  Result (*cuMemFree_v2)(DevicePointer pointer);
  Result (*cuMemcpyHtoD_v2)(DevicePointer to, const void* from, size_t bytes);
  Result (*cuMemcpyDtoH_v2)(void* to, DevicePointer from, size_t bytes);
  Result (*cuMemcpyDtoDAsync_v2)(DevicePointer to, DevicePointer from, size_t bytes, void* stream);
  Result (*cuPointerGetAttribute)(void* value, int attribute, DevicePointer pointer);
  Result (*cuEventCreate)(void** event, unsigned flags);
  Result (*cuEventDestroy_v2)(void* event);
  Result (*cuEventRecord)(void* event, void* stream);
  Result (*cuEventSynchronize)(void* event);
  Result (*cuEventElapsedTime)(float* milliseconds, void* from, void* to);
  Result (*cuTensorMapEncodeTiled)(TensorMap* map, int type, uint32_t rank, void* data, const uint64_t* size,
                                   const uint64_t* stride, const uint32_t* box, const uint32_t* element_stride, int interleave,
                                   int swizzle, int l2_promotion, int out_of_bounds);
  Result (*cuGetErrorString)(Result error, const char** text);
  // Of the emulated GPU's library (src/emulate) alone: it brings images of its own.
  const char* (*linnetFindImage)(const char* name) = nullptr;

  std::string missing;    // why there is no driver or no GPU that runs any of the images
  std::string no_hopper;  // why it does not run those for Hopper
  std::string name;
  int devices = 0;
};

constexpr int kComputeMajor = 75, kComputeMinor = 76, kMultiprocessors = 16, kSharedOfBlock = 97;  // CU_DEVICE_ATTRIBUTE_...
constexpr int kDeviceOrdinal = 9;         // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
constexpr int kMaxSharedBytes = 8;        // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kNonPortableClusters = 14;  // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
constexpr int kPortableCluster = 8;

Driver load_driver() {
  Driver driver{};
  const char* emulated = std::getenv("LINNET_CUDA_DRIVER");  // a testing aid: docs/emulate.md
  if (image_count() == 0 && emulated == nullptr) {
    driver.missing = "this build has no CUDA kernels (it was built without nvcc)";
    return driver;
  }
  void* library = dlopen(emulated != nullptr ? emulated : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    driver.missing = emulated != nullptr ? std::string("LINNET_CUDA_DRIVER cannot be loaded: ") + dlerror()
                                         : "this machine has no NVIDIA driver (libcuda.so.1)";
    return driver;
  }
  const char* absent = nullptr;
  const auto find = [&](const char* name, auto* function) {
    void* address = dlsym(library, name);
    if (address == nullptr && absent == nullptr) absent = name;
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(address);
  };
#define LINNET_FIND(name) find(#name, &driver.name)
  LINNET_FIND(cuInit);
  LINNET_FIND(cuDeviceGetCount);
  LINNET_FIND(cuDeviceGet);
  LINNET_FIND(cuDeviceGetName);
  LINNET_FIND(cuDeviceGetAttribute);
  LINNET_FIND(cuDevicePrimaryCtxRetain);
  LINNET_FIND(cuCtxGetCurrent);
  LINNET_FIND(cuCtxSetCurrent);
  LINNET_FIND(cuCtxGetDevice);
  LINNET_FIND(cuCtxSynchronize);
  LINNET_FIND(cuModuleLoadData);
  LINNET_FIND(cuModuleGetFunction);
  LINNET_FIND(cuFuncSetAttribute);
  LINNET_FIND(cuLaunchKernel);
  LINNET_FIND(cuOccupancyMaxActiveClusters);
  LINNET_FIND(cuMemAlloc_v2);
  LINNET_FIND(cuMemFree_v2);
  LINNET_FIND(cuMemcpyHtoD_v2);
  LINNET_FIND(cuMemcpyDtoH_v2);
  LINNET_FIND(cuMemcpyDtoDAsync_v2);
  LINNET_FIND(cuPointerGetAttribute);
  LINNET_FIND(cuEventCreate);
  LINNET_FIND(cuEventDestroy_v2);
  LINNET_FIND(cuEventRecord);
  LINNET_FIND(cuEventSynchronize);
  LINNET_FIND(cuEventElapsedTime);
  LINNET_FIND(cuTensorMapEncodeTiled);
  LINNET_FIND(cuGetErrorString);
#undef LINNET_FIND
  if (emulated != nullptr) find("linnetFindImage", &driver.linnetFindImage);
  if (absent != nullptr) {
    driver.missing = std::string(emulated != nullptr ? emulated : "the NVIDIA driver is too old") + ": it has no " + absent;
    return driver;
  }
  const Result started = driver.cuInit(0);
  if (started != 0 || driver.cuDeviceGetCount(&driver.devices) != 0 || driver.devices == 0) {
    const char* text = nullptr;
    if (started != 0) driver.cuGetErrorString(started, &text);
    driver.missing = std::string("this machine has no usable NVIDIA GPU") + (text == nullptr ? "" : std::string(": ") + text);
    return driver;
  }
  char name[128] = "";
  int major = 0, minor = 0;
  driver.cuDeviceGetName(name, sizeof name, 0);
  driver.cuDeviceGetAttribute(&major, kComputeMajor, 0);
  driver.cuDeviceGetAttribute(&minor, kComputeMinor, 0);
  driver.name = name;
  const std::string has = "this machine's " + driver.name + " has " + std::to_string(major) + "." + std::to_string(minor);
  if (major < 8) driver.missing = "the CUDA kernels are for compute capability 8.0 and newer, " + has;
  if (major != 9 || minor != 0) driver.no_hopper = "these kernels are for compute capability 9.0 (H100, H200), " + has;
  return driver;
}

const Driver& driver() {
  static const Driver loaded = load_driver();
  return loaded;
}

const char* error_text(Result result) {
  const char* text = nullptr;
  if (driver().cuGetErrorString(result, &text) != 0 || text == nullptr) text = "unknown error of the CUDA driver";
  return text;
}

Status status_of(const char* what, Result result) {
  if (result == 0) return {};
  return impossible(std::string("CUDA: ") + what + ": " + error_text(result));
}

// The primary context of a device, kept for the life of the process.
void* primary_context(int ordinal) {
  static std::mutex mutex;
  static std::map<int, void*> contexts;
  const std::lock_guard<std::mutex> lock(mutex);
  void*& context = contexts[ordinal];
  int device;
  if (context == nullptr && driver().cuDeviceGet(&device, ordinal) == 0) driver().cuDevicePrimaryCtxRetain(&context, device);
  return context;
}

// The first device's context, unless the caller already uses another one.
Status use_device() {
  if (const std::string reason = missing(); !reason.empty()) return impossible(reason);
  void* context = nullptr;
  driver().cuCtxGetCurrent(&context);
  if (context != nullptr) return {};
  context = primary_context(0);
  if (context == nullptr) return impossible("CUDA: the first GPU has no context");
  return status_of("making the first GPU current", driver().cuCtxSetCurrent(context));
}

// The function of a kernel in the current context; images are loaded when first used.
Result find_function(const Kernel& kernel, void** function) {
  static std::mutex mutex;
  static std::map<std::pair<void*, std::string>, void*> modules;
  struct Found {
    void* function = nullptr;
    int shared_bytes = 48 * 1024;  // what it may ask for
  };
  static std::map<std::pair<void*, std::string>, Found> functions;
  void* context = nullptr;
  driver().cuCtxGetCurrent(&context);
  const std::lock_guard<std::mutex> lock(mutex);
  Found& known = functions[{context, std::string(kernel.image) + "/" + kernel.name}];
  void*& found = known.function;
  if (found == nullptr) {
    void*& module = modules[{context, kernel.image}];
    if (module == nullptr) {
      const char* image =
          driver().linnetFindImage != nullptr ? driver().linnetFindImage(kernel.image) : find_image(kernel.image);
      if (image == nullptr) return kInvalidValue;
      if (const Result result = driver().cuModuleLoadData(&module, image); result != 0) return result;
    }
    if (const Result result = driver().cuModuleGetFunction(&found, module, kernel.name); result != 0) return result;
    if (kernel.cluster > kPortableCluster) {
      const Result result = driver().cuFuncSetAttribute(found, kNonPortableClusters, 1);
      if (result != 0) return found = nullptr, result;
    }
  }
  if (kernel.shared_bytes > known.shared_bytes) {
    const Result result = driver().cuFuncSetAttribute(found, kMaxSharedBytes, kernel.shared_bytes);
    if (result != 0) return found = nullptr, result;
    known.shared_bytes = kernel.shared_bytes;
  }
  *function = found;
  return 0;
}

}  // namespace

namespace {

thread_local Recording* recording = nullptr;

}  // namespace

Recording::Recording() : outer_(recording) { recording = this; }
Recording::~Recording() { recording = outer_; }
bool is_recording() { return recording != nullptr; }

std::string missing() { return recording != nullptr ? "" : driver().missing; }
std::string missing_on_hopper() {
  if (recording != nullptr) return "";
  return driver().missing.empty() ? driver().no_hopper : driver().missing;
}
bool is_hopper() { return recording != nullptr || !driver().missing.empty() || driver().no_hopper.empty(); }
std::string device_name() { return driver().name; }

int multiprocessor_count() {
  int device = 0, count = 0;
  if (recording != nullptr) return 132;
  if (!missing().empty()) return 0;
  if (driver().cuCtxGetDevice(&device) != 0) device = 0;
  driver().cuDeviceGetAttribute(&count, kMultiprocessors, device);
  return count;
}

int shared_bytes_of_block() {
  constexpr int kHopper = 227 * 1024;
  if (recording != nullptr || !missing().empty()) return kHopper;
  static const int bytes = [] {  // of the first device: others of a machine are of its kind
    int count = 0;
    driver().cuDeviceGetAttribute(&count, kSharedOfBlock, 0);
    return count;
  }();
  return bytes;
}

int clusters_at_a_time(const Kernel& kernel) {
  static std::mutex mutex;
  static std::map<void*, int> counts;
  void* function = nullptr;
  if (recording != nullptr) return 132 / kernel.cluster;
  if (!missing().empty() || find_function(kernel, &function) != 0) return 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [known, is_new] = counts.try_emplace(function, 0);
  if (is_new) {
    const auto shared = static_cast<unsigned>(kernel.shared_bytes);
    const LaunchConfig config = {
        {static_cast<unsigned>(kernel.cluster), 1, 1}, {static_cast<unsigned>(kernel.threads), 1, 1}, shared};
    if (driver().cuOccupancyMaxActiveClusters(&known->second, function, &config) != 0) known->second = 0;
  }
  return known->second;
}

Scope::Scope(const void* pointer) {
  if (recording != nullptr || !missing().empty()) return;
  int ordinal = 0;
  const auto address = reinterpret_cast<DevicePointer>(pointer);
  if (pointer != nullptr) {
    if (const Result result = driver().cuPointerGetAttribute(&ordinal, kDeviceOrdinal, address); result != 0) {
      error_ = error_text(result);
      return;
    }
  }
  void* wanted = primary_context(ordinal);
  driver().cuCtxGetCurrent(&before_);
  if (before_ == wanted) return;
  if (const Result result = driver().cuCtxSetCurrent(wanted); result != 0) error_ = error_text(result);
  changed_ = true;
}
Scope::~Scope() {
  if (changed_) driver().cuCtxSetCurrent(before_);
}
Status Scope::status() const {
  if (error_ == nullptr) return {};
  return impossible(std::string("its data is not on a usable CUDA device: ") + error_);
}

void enqueue(const Launch& launch, const Kernel& kernel, const Grid& grid, const Parameters& parameters) {
  if (*launch.error != nullptr || grid.x <= 0 || grid.y <= 0 || grid.z <= 0) return;
  if (recording != nullptr) {
    recording->launches.push_back({kernel.image,
                                   kernel.name,
                                   kernel.threads,
                                   kernel.shared_bytes,
                                   kernel.cluster,
                                   grid,
                                   {parameters.bytes, parameters.bytes + parameters.count}});
    return;
  }
  void* function = nullptr;
  Result result = find_function(kernel, &function);
  if (result == 0) {
    result = driver().cuLaunchKernel(function, static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                                     static_cast<unsigned>(grid.z), static_cast<unsigned>(kernel.threads), 1, 1,
                                     static_cast<unsigned>(kernel.shared_bytes), launch.stream, parameters.data, nullptr);
  }
  if (result != 0) *launch.error = error_text(result);
}

bool encode_tensor_map(TensorMap* map, Dtype dtype, const void* data, int rank, const uint64_t* size, const uint64_t* stride,
                       const uint32_t* box) {
  if (recording != nullptr) return true;
  constexpr int kFloat16 = 6, kBfloat16 = 9, kSwizzle128 = 3, kPromote128 = 2, kPromote256 = 3;  // CU_TENSOR_MAP_...
  const uint32_t ones[5] = {1, 1, 1, 1, 1};
  const int promote = size[0] * 2 > 128 ? kPromote256 : kPromote128;  // no further than the row: the next may not be wanted
  return driver().cuTensorMapEncodeTiled(map, dtype == Dtype::f16 ? kFloat16 : kBfloat16, static_cast<uint32_t>(rank),
                                         const_cast<void*>(data), size, stride, box, ones, 0, kSwizzle128, promote, 0) == 0;
}

Status allocate(int64_t bytes, void** memory) {
  LINNET_TRY(use_device());
  DevicePointer pointer = 0;
  const Result result = driver().cuMemAlloc_v2(&pointer, static_cast<size_t>(bytes > 0 ? bytes : 1));
  *memory = reinterpret_cast<void*>(pointer);
  return status_of(("allocating " + std::to_string(bytes) + " bytes").c_str(), result);
}
void release(void* memory) {
  if (memory != nullptr) driver().cuMemFree_v2(reinterpret_cast<DevicePointer>(memory));
}
Status copy_to_device(void* device, const void* host, int64_t bytes) {
  return status_of("copying to the GPU",
                   driver().cuMemcpyHtoD_v2(reinterpret_cast<DevicePointer>(device), host, static_cast<size_t>(bytes)));
}
Status copy_to_host(void* host, const void* device, int64_t bytes) {
  return status_of("copying from the GPU",
                   driver().cuMemcpyDtoH_v2(host, reinterpret_cast<DevicePointer>(device), static_cast<size_t>(bytes)));
}
Status copy_on_device(void* to, const void* from, int64_t bytes) {
  return status_of("copying on the GPU",
                   driver().cuMemcpyDtoDAsync_v2(reinterpret_cast<DevicePointer>(to), reinterpret_cast<DevicePointer>(from),
                                                 static_cast<size_t>(bytes), nullptr));
}
Status synchronize() { return status_of("waiting for the GPU", driver().cuCtxSynchronize()); }

Event::Event() { driver().cuEventCreate(&event_, 0); }
Event::~Event() { driver().cuEventDestroy_v2(event_); }
void Event::record() { driver().cuEventRecord(event_, nullptr); }
double Event::seconds_since(const Event& earlier) const {
  float milliseconds = 0;
  driver().cuEventSynchronize(event_);
  driver().cuEventElapsedTime(&milliseconds, earlier.event_, event_);
  return 1e-3 * static_cast<double>(milliseconds);
}

}  // namespace linnet::cuda
