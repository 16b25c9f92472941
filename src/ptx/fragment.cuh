// Fragment: which elements of an accumulator a lane holds, the same for wgmma and mma.
//
// A warp holds 16 rows. Number j of a lane's accumulators is
//
//   row     lane / 4, and 8 below for j % 4 = 2 and 3          column   8 (j / 4) + 2 (lane % 4) + j % 2
//
// so that numbers j and j + 1 (j even) are neighbours in a row: a pair. `lane` may be the thread's number in a larger group
// where columns alone are asked for.
#pragma once

namespace linnet::ptx {

struct Fragment {
  int lane;
  __device__ __forceinline__ int column(int j) const { return j / 4 * 8 + lane % 4 * 2 + (j & 1); }
  __device__ __forceinline__ int pair(int j) const { return j / 4 * 8 + lane % 4 * 2; }  // the first column of a pair
  // Number j of the four of an operand A [16, 16], packed pairs; k: which 16 columns. The first column of its pair.
  __device__ __forceinline__ int operand_pair(int k, int j) const { return 16 * k + j / 2 * 8 + lane % 4 * 2; }
  static constexpr int below(int j) { return (j & 2) * 4; }  // rows below that of number 0
};

}  // namespace linnet::ptx
