// recurrence, decay, gla, delta and gated_delta on the vector units: their rows (source.h) through the engine.
#include "source.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
int64_t partial_bytes(const RecurrenceArgs& args) {
  Arena arena;
  if (args.g_head.given()) {
    const RecurrenceShape s = recurrence_shape(args);
    arena.take<T>(s.N * s.H);
  }
  return arena.used();
}

}  // namespace

void recurrence_forward(const RecurrenceArgs& args, const RecurrenceOut& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() {
    const RecurrenceGrads grads;
    engine_forward(RecurrenceSource<T, E>(args, out, grads), launch);
  });
}

void recurrence_backward(const RecurrenceArgs& args, const RecurrenceOut& out, const RecurrenceGrads& grads,
                         const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() {
    RecurrenceSource<T, E> source(args, out, grads);
    T* partial = reinterpret_cast<T*>(launch.workspace);
    Launch rest = launch;
    rest.workspace += partial_bytes<T>(args);
    if (grads.dg_head.given()) source.keep_head_gradients(partial);
    engine_backward(source, rest);
    const RecurrenceShape s = recurrence_shape(args);
    for (int64_t h = 0; grads.dg_head.given() && h < s.H; ++h) {  // sequences in order
      T sum = 0;
      for (int64_t n = 0; n < s.N; ++n) sum += partial[n * s.H + h];
      store_f64(grads.dg_head.data, grads.dg_head.dtype, h * grads.dg_head.stride[0], static_cast<double>(sum));
    }
  });
}

int64_t recurrence_workspace(const RecurrenceArgs& args, Pass pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() {
    const RecurrenceOut out;
    const RecurrenceGrads grads;
    const int64_t engine = engine_workspace(RecurrenceSource<T, E>(args, out, grads), pass, workers);
    return engine + (pass == Pass::backward ? partial_bytes<T>(args) : 0);
  });
}

}  // namespace linnet::LINNET_ISA
