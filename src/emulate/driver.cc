// The driver's functions that src/core/cuda/driver.cc calls, for the emulated GPU: LINNET_CUDA_DRIVER names this library. Its
// images are the shared libraries beside it (compile.sh), and its memory is the host's, full of NaN, with pages around it that
// nobody may touch. Everything is done when a call returns.
#include <dlfcn.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "emulate/launch.h"

namespace linnet::emulate {
namespace {

enum Result { kDone = 0, kInvalid = 1, kNoMemory = 2, kNotFound = 500 };
// An A100, the oldest GPU that the kernels are for, or with LINNET_EMULATE_GPU=h200 one of Hopper's.
bool is_hopper() {
  static const bool is = [] {
    const char* text = std::getenv("LINNET_EMULATE_GPU");
    if (text != nullptr && std::string(text) != "h200" && std::string(text) != "a100") {
      fail("LINNET_EMULATE_GPU is a100 or h200");
    }
    return text != nullptr && std::string(text) == "h200";
  }();
  return is;
}
constexpr int kComputeMajor = 75, kComputeMinor = 76, kMultiprocessors = 16, kSharedOfBlock = 97;
constexpr int kSharedUnasked = 48 * 1024;
// Of a block: that of the GPU, or LINNET_EMULATE_SHARED kilobytes (99: GPUs of compute capability 8.6 and 8.9).
int most_shared() {
  static const int bytes = [] {
    const char* text = std::getenv("LINNET_EMULATE_SHARED");
    return (text != nullptr ? std::atoi(text) : is_hopper() ? 227 : 163) * 1024;
  }();
  return bytes;
}
constexpr int kMaxSharedBytes = 8;

struct Function {
  std::string name;
  void (*call)(void** parameters);
  void (*touch)();
  int shared_bytes = kSharedUnasked;  // what it may ask for
};
struct Image {
  std::string path;
  void* library = nullptr;
  std::map<std::string, std::unique_ptr<Function>> functions;
};
// Allocations by where they begin: the memory behind is slack up to a page, and must stay as it was.
struct Allocation {
  char* pages;
  size_t bytes, all;
};
std::map<uintptr_t, Allocation> allocations;
void* current = nullptr;
int context;  // its address is the only one

constexpr size_t kPage = 4096, kAlignment = 256;
constexpr unsigned char kSpoilt = 0xff;  // NaN in every type

using Moment = std::chrono::steady_clock::time_point;

}  // namespace
}  // namespace linnet::emulate

using namespace linnet::emulate;
using Pointer = unsigned long long;

extern "C" {

// Not of CUDA: where the images come from. Null: there is none of that name.
const char* linnetFindImage(const char* name) {
  static std::map<std::string, std::unique_ptr<Image>> images;
  std::unique_ptr<Image>& image = images[name];
  if (image == nullptr) {
    Dl_info here;
    dladdr(reinterpret_cast<void*>(&linnetFindImage), &here);
    const auto path = std::filesystem::path(here.dli_fname).parent_path() / (std::string(name) + ".so");
    if (!std::filesystem::exists(path)) return nullptr;
    image = std::make_unique<Image>();
    image->path = path;
  }
  return reinterpret_cast<const char*>(image.get());
}

int cuInit(unsigned) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? kDone : kInvalid; }
int cuDeviceGetCount(int* count) { return *count = 1, kDone; }
int cuDeviceGet(int* device, int) { return *device = 0, kDone; }
int cuDeviceGetName(char* name, int length, int) {
  std::strncpy(name, "emulated GPU", static_cast<size_t>(length));
  return kDone;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case kComputeMajor: *value = is_hopper() ? 9 : 8; return kDone;
    case kComputeMinor: *value = 0; return kDone;
    case kMultiprocessors: *value = 4; return kDone;  // few: so that small cases share out their work
    case kSharedOfBlock: *value = most_shared(); return kDone;
    default: return kInvalid;
  }
}
int cuDevicePrimaryCtxRetain(void** primary, int) { return *primary = &context, kDone; }
int cuCtxGetCurrent(void** now) { return *now = current, kDone; }
int cuCtxSetCurrent(void* next) { return current = next, kDone; }
int cuCtxGetDevice(int* device) { return *device = 0, kDone; }
int cuCtxSynchronize() { return kDone; }

int cuModuleLoadData(void** module, const void* data) {
  auto* image = static_cast<Image*>(const_cast<void*>(data));
  if (image->library == nullptr) image->library = dlopen(image->path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (image->library == nullptr) fail(dlerror());
  *module = image;
  return kDone;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  auto* image = static_cast<Image*>(module);
  std::unique_ptr<Function>& found = image->functions[name];
  if (found == nullptr) {
    void* call = dlsym(image->library, (std::string(name) + "_emulated").c_str());
    if (call == nullptr) return kNotFound;
    found = std::make_unique<Function>(Function{name, reinterpret_cast<void (*)(void**)>(call),
                                                reinterpret_cast<void (*)()>(dlsym(image->library, "touch_emulated"))});
  }
  *function = found.get();
  return kDone;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (attribute != kMaxSharedBytes || value > most_shared()) return kInvalid;
  static_cast<Function*>(function)->shared_bytes = value;
  return kDone;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void*, void** parameters, void**) {
  const auto& f = *static_cast<Function*>(function);
  if (gy > 65535 || gz > 65535 || static_cast<int>(shared) > f.shared_bytes) return kInvalid;
  run({f.name.c_str(), f.call, f.touch, parameters, {gx, gy, gz}, {bx, by, bz}, static_cast<int>(shared)});
  return kDone;
}
int cuOccupancyMaxActiveClusters(int* count, void*, const void*) { return *count = 0, kDone; }

int cuMemAlloc_v2(Pointer* pointer, size_t bytes) {
  const size_t inner = (bytes + kPage - 1) / kPage * kPage, all = inner + 2 * kPage;
  void* pages = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return kNoMemory;
  auto* first = static_cast<char*>(pages);
  mprotect(first, kPage, PROT_NONE);
  mprotect(first + kPage + inner, kPage, PROT_NONE);
  std::memset(first + kPage, kSpoilt, inner);
  // As near to the end as its alignment lets it.
  char* begin = first + kPage + (inner - bytes) / kAlignment * kAlignment;
  *pointer = reinterpret_cast<Pointer>(begin);
  allocations[static_cast<uintptr_t>(*pointer)] = {first, bytes, all};
  return kDone;
}
int cuMemFree_v2(Pointer pointer) {
  const auto at = allocations.find(static_cast<uintptr_t>(pointer));
  if (at == allocations.end()) return kInvalid;
  const Allocation& a = at->second;
  const auto* begin = reinterpret_cast<const unsigned char*>(pointer);
  const auto* end = reinterpret_cast<const unsigned char*>(a.pages) + a.all - kPage;
  for (const unsigned char* p = reinterpret_cast<const unsigned char*>(a.pages) + kPage; p < end; ++p) {
    if (p == begin) p += a.bytes;
    if (p < end && *p != kSpoilt) fail("a kernel wrote beside the memory that was allocated");
  }
  munmap(a.pages, a.all);
  allocations.erase(at);
  return kDone;
}
int cuMemcpyHtoD_v2(Pointer to, const void* from, size_t bytes) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), kDone;
}
int cuMemcpyDtoH_v2(void* to, Pointer from, size_t bytes) {
  return std::memcpy(to, reinterpret_cast<const void*>(from), bytes), kDone;
}
int cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, void*) {
  return std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes), kDone;
}
int cuPointerGetAttribute(void* value, int, Pointer pointer) {
  auto at = allocations.upper_bound(static_cast<uintptr_t>(pointer));
  if (at == allocations.begin() || pointer > std::prev(at)->first + std::prev(at)->second.bytes) return kInvalid;
  *static_cast<int*>(value) = 0;
  return kDone;
}

int cuEventCreate(void** event, unsigned) { return *event = new Moment, kDone; }
int cuEventDestroy_v2(void* event) { return delete static_cast<Moment*>(event), kDone; }
int cuEventRecord(void* event, void*) { return *static_cast<Moment*>(event) = std::chrono::steady_clock::now(), kDone; }
int cuEventSynchronize(void*) { return kDone; }
int cuEventElapsedTime(float* milliseconds, void* from, void* to) {
  *milliseconds = std::chrono::duration<float, std::milli>(*static_cast<Moment*>(to) - *static_cast<Moment*>(from)).count();
  return kDone;
}
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* data, const uint64_t* size, const uint64_t* stride,
                           const uint32_t* box, const uint32_t* element_stride, int interleave, int swizzle, int, int) {
  constexpr int kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9, kNoSwizzle = 0, kSwizzle128 = 3;
  if (!is_hopper() || rank < 1 || rank > 5 || reinterpret_cast<uintptr_t>(data) % 16 != 0 || interleave != 0) return kInvalid;
  if ((type != kFloat16 && type != kBfloat16 && type != kFloat32) || (swizzle != kNoSwizzle && swizzle != kSwizzle128)) {
    return kInvalid;
  }
  TensorBox b = {TensorBox::kMark, type == kFloat32 ? 4u : 2u, data, {}, {}, {}, swizzle == kSwizzle128};
  for (unsigned d = 0; d < 5; ++d) {
    b.size[d] = d < rank ? size[d] : 1;
    b.stride[d] = d == 0 ? b.element : d < rank ? stride[d - 1] : 0;
    b.box[d] = static_cast<uint16_t>(d < rank ? box[d] : 1);
    if (b.size[d] == 0 || b.size[d] > uint64_t{1} << 32 || b.box[d] == 0 || b.box[d] > 256) return kInvalid;
    if (d > 0 && (b.stride[d] % 16 != 0 || b.stride[d] >= uint64_t{1} << 40)) return kInvalid;
    if (d < rank && element_stride[d] != 1) return kInvalid;
  }
  const uint32_t row = b.box[0] * b.element;
  if (row % 16 != 0 || (b.is_swizzled && row > 128)) return kInvalid;
  std::memset(map, 0, 128);
  std::memcpy(map, &b, sizeof b);
  return kDone;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == kInvalid    ? "the emulated GPU does not take this"
          : error == kNoMemory ? "out of memory"
          : error == kNotFound ? "no such kernel"
                               : "unknown error";
  return kDone;
}

}  // extern "C"
