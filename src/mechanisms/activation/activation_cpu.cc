// activation, glu and add on the vector units: row by row, tasks of some 16,384 elements. Results may lie where inputs do.
#include "activation.h"
#include "activation_math.h"
#include "core/heads.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {

constexpr int64_t kElements = 16384;

// body(b, t, h) for each row
template <class Body>
void each_row(const View& x, const Launch& launch, const Body& body) {
  const int64_t B = x.size[0], T = x.size[1], H = x.size[2], row = H * x.size[3];
  const int64_t tokens = row >= kElements ? 1 : kElements / (row > 0 ? row : 1), tiles = (T + tokens - 1) / tokens;
  parallel(launch, B * tiles, [&](int64_t task, int) {
    const int64_t first = task % tiles * tokens, end = first + tokens < T ? first + tokens : T;
    for (int64_t t = first; t < end; ++t) {
      for (int64_t h = 0; h < H; ++h) body(task / tiles, t, h);
    }
  });
}

template <class E>
LINNET_INLINE E* row_of(const View& view, int64_t b, int64_t t, int64_t h) {
  return view.given() ? view.at<E>(b, t, h) : nullptr;
}
template <class T, class E>
LINNET_INLINE typename Vec<T>::V load_or_zero(const E* p, int c, int n) {
  return p == nullptr ? Vec<T>::zero() : Vec<T>::load(p + c, n);
}

}  // namespace

void activation_forward(const ActivationArgs& args, const ActivationOut& out, const Launch& launch) {
  const View x = with_heads(args.x), y = with_heads(out.out);
  const int n = static_cast<int>(x.size[3]);
  by_dtype(x.dtype, [&]<class T, class E>() {
    by_activation(args.act, [&]<Activation kAct>() {
      using X = Vec<T>;
      each_row(x, launch, [&](int64_t b, int64_t t, int64_t h) {
        const E* from = x.at<const E>(b, t, h);
        E* to = y.at<E>(b, t, h);
        for (int c = 0; c < n; c += X::W) {
          X::store(to + c, activate<kAct, false>(X::load(from + c, n - c), static_cast<T>(args.cap), nullptr), n - c);
        }
      });
    });
  });
}
void activation_backward(const ActivationArgs& args, const ActivationOut&, const ActivationGrads& grads, const Launch& launch) {
  if (!grads.dx.given()) return;
  const View x = with_heads(args.x), dout = with_heads(grads.dout), dx = with_heads(grads.dx);
  const int n = static_cast<int>(x.size[3]);
  by_dtype(x.dtype, [&]<class T, class E>() {
    by_activation(args.act, [&]<Activation kAct>() {
      using X = Vec<T>;
      each_row(x, launch, [&](int64_t b, int64_t t, int64_t h) {
        const E* from = x.at<const E>(b, t, h);
        const E* d = row_of<const E>(dout, b, t, h);
        E* to = dx.at<E>(b, t, h);
        for (int c = 0; c < n; c += X::W) {
          typename X::V slope;
          activate<kAct, true>(X::load(from + c, n - c), static_cast<T>(args.cap), &slope);
          X::store(to + c, d == nullptr ? X::zero() : slope * X::load(d + c, n - c), n - c);
        }
      });
    });
  });
}
int64_t activation_workspace(const ActivationArgs&, Pass, int) { return 0; }

void glu_forward(const GluArgs& args, const ActivationOut& out, const Launch& launch) {
  const View gate = with_heads(args.gate), up = with_heads(args.up), y = with_heads(out.out);
  const int n = static_cast<int>(gate.size[3]);
  by_dtype(gate.dtype, [&]<class T, class E>() {
    by_gate(args.act, [&]<Activation kAct>() {
      using X = Vec<T>;
      each_row(gate, launch, [&](int64_t b, int64_t t, int64_t h) {
        const E* g = gate.at<const E>(b, t, h);
        const E* u = up.at<const E>(b, t, h);
        E* to = y.at<E>(b, t, h);
        for (int c = 0; c < n; c += X::W) {
          X::store(to + c, activate<kAct, false>(X::load(g + c, n - c), T(1), nullptr) * X::load(u + c, n - c), n - c);
        }
      });
    });
  });
}
void glu_backward(const GluArgs& args, const ActivationOut&, const GluGrads& grads, const Launch& launch) {
  const View gate = with_heads(args.gate), up = with_heads(args.up), dout = with_heads(grads.dout);
  const View dgate = with_heads(grads.dgate), dup = with_heads(grads.dup);
  const int n = static_cast<int>(gate.size[3]);
  by_dtype(gate.dtype, [&]<class T, class E>() {
    by_gate(args.act, [&]<Activation kAct>() {
      using X = Vec<T>;
      each_row(gate, launch, [&](int64_t b, int64_t t, int64_t h) {
        const E* g = gate.at<const E>(b, t, h);
        const E* u = up.at<const E>(b, t, h);
        const E* d = row_of<const E>(dout, b, t, h);
        E* to_gate = row_of<E>(dgate, b, t, h);
        E* to_up = row_of<E>(dup, b, t, h);
        for (int c = 0; c < n; c += X::W) {
          typename X::V slope;
          const typename X::V y = activate<kAct, true>(X::load(g + c, n - c), T(1), &slope),
                              incoming = load_or_zero<T>(d, c, n - c);
          if (to_gate != nullptr) X::store(to_gate + c, incoming * X::load(u + c, n - c) * slope, n - c);
          if (to_up != nullptr) X::store(to_up + c, incoming * y, n - c);
        }
      });
    });
  });
}
int64_t glu_workspace(const GluArgs&, Pass, int) { return 0; }

void add_forward(const AddArgs& args, const ActivationOut& out, const Launch& launch) {
  const View x = with_heads(args.x), y = with_heads(args.y), z = with_heads(out.out);
  const int n = static_cast<int>(x.size[3]);
  by_dtype(x.dtype, [&]<class T, class E>() {
    using X = Vec<T>;
    const typename X::V scale = X::broadcast(static_cast<T>(args.scale));
    each_row(x, launch, [&](int64_t b, int64_t t, int64_t h) {
      const E* first = x.at<const E>(b, t, h);
      const E* second = y.at<const E>(b, t, h);
      E* to = z.at<E>(b, t, h);
      for (int c = 0; c < n; c += X::W) {
        X::store(to + c, fma(scale, X::load(second + c, n - c), X::load(first + c, n - c)), n - c);
      }
    });
  });
}
void add_backward(const AddArgs& args, const ActivationOut&, const AddGrads& grads, const Launch& launch) {
  const View x = with_heads(args.x), dout = with_heads(grads.dout), dx = with_heads(grads.dx), dy = with_heads(grads.dy);
  const int n = static_cast<int>(x.size[3]);
  by_dtype(x.dtype, [&]<class T, class E>() {
    using X = Vec<T>;
    const typename X::V scale = X::broadcast(static_cast<T>(args.scale));
    each_row(x, launch, [&](int64_t b, int64_t t, int64_t h) {
      const E* d = row_of<const E>(dout, b, t, h);
      E* to_x = row_of<E>(dx, b, t, h);
      E* to_y = row_of<E>(dy, b, t, h);
      for (int c = 0; c < n; c += X::W) {
        const typename X::V incoming = load_or_zero<T>(d, c, n - c);
        if (to_x != nullptr) X::store(to_x + c, incoming, n - c);
        if (to_y != nullptr) X::store(to_y + c, scale * incoming, n - c);
      }
    });
  });
}
int64_t add_workspace(const AddArgs&, Pass, int) { return 0; }

}  // namespace linnet::LINNET_ISA
