#include "dense_blas.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace linnet::cuda {
namespace {

// The functions of cuBLAS that are used here, by their names; the types are those of cublas_v2.h.
struct Blas {
  int (*cublasCreate_v2)(void** handle) = nullptr;
  int (*cublasSetStream_v2)(void* handle, void* stream) = nullptr;
  int (*cublasSetWorkspace_v2)(void* handle, void* workspace, size_t bytes) = nullptr;
  int (*cublasSetMathMode)(void* handle, int mode) = nullptr;
  int (*cublasGemmEx)(void* handle, int turn_a, int turn_b, int m, int n, int k, const void* alpha, const void* a, int type_a,
                      int lda, const void* b, int type_b, int ldb, const void* beta, void* c, int type_c, int ldc, int compute,
                      int algorithm) = nullptr;
  int (*cuCtxGetCurrent)(void** context) = nullptr;
  bool found = false;
};

Blas load_blas() {
  Blas blas;
  void* library = nullptr;
  for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so", "/usr/local/cuda/lib64/libcublas.so"}) {
    if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr || driver == nullptr) return blas;
  blas.found = true;
  const auto find = [&](void* from, const char* name, auto* function) {
    void* address = dlsym(from, name);
    if (address == nullptr) blas.found = false;
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(address);
  };
  find(library, "cublasCreate_v2", &blas.cublasCreate_v2);
  find(library, "cublasSetStream_v2", &blas.cublasSetStream_v2);
  find(library, "cublasSetWorkspace_v2", &blas.cublasSetWorkspace_v2);
  find(library, "cublasSetMathMode", &blas.cublasSetMathMode);
  find(library, "cublasGemmEx", &blas.cublasGemmEx);
  find(driver, "cuCtxGetCurrent", &blas.cuCtxGetCurrent);
  return blas;
}
const Blas& blas() {
  static const Blas loaded = load_blas();
  return loaded;
}

constexpr int kTurned = 1, kStraight = 0;               // CUBLAS_OP_T, CUBLAS_OP_N
constexpr int kCompute32 = 68, kDefaultAlgorithm = -1;  // CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
constexpr int kWholeSums = 16;                          // CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
int type_of(Dtype dtype) { return dtype == Dtype::f32 ? 0 : dtype == Dtype::bf16 ? 14 : 2; }  // CUDA_R_32F, _16BF, _16F

}  // namespace

bool has_blas() { return blas().found; }

const char* multiply_blas(const Launch& launch, const View& x, const View& weight, const View& out, bool add, void* workspace) {
  static std::mutex mutex;
  static std::map<void*, void*> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  void* context = nullptr;
  blas().cuCtxGetCurrent(&context);
  void*& handle = handles[context];
  if (handle == nullptr && blas().cublasCreate_v2(&handle) != 0) return handle = nullptr, "cuBLAS did not start";
  const float one = 1, beta = add ? 1 : 0;
  if (blas().cublasSetStream_v2(handle, launch.stream) != 0 || blas().cublasSetMathMode(handle, kWholeSums) != 0 ||
      blas().cublasSetWorkspace_v2(handle, workspace, kBlasWorkspace) != 0) {
    return "cuBLAS refused its stream or workspace";
  }
  const int type = type_of(x.dtype), rows = static_cast<int>(x.size[1]), width = static_cast<int>(x.size[2]);
  const int outputs = static_cast<int>(weight.size[0]);
  for (int64_t b = 0; b < x.size[0]; ++b) {  // each batch row is one product, the same whatever the others are
    const char* from = static_cast<const char*>(x.data) + b * x.stride[0] * dtype_size(x.dtype);
    char* to = static_cast<char*>(out.data) + b * out.stride[0] * dtype_size(x.dtype);
    const int result = blas().cublasGemmEx(handle, kTurned, kStraight, outputs, rows, width, &one, weight.data, type,
                                           static_cast<int>(weight.stride[0]), from, type, static_cast<int>(x.stride[1]), &beta,
                                           to, type, static_cast<int>(out.stride[1]), kCompute32, kDefaultAlgorithm);
    if (result != 0) return "cuBLAS refused the product";
  }
  return nullptr;
}

}  // namespace linnet::cuda
