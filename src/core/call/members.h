// Members of an operator's structs (arguments, results, gradients) by their offset, as its declaration has it.
#pragma once

#include <cstddef>

#include "core/view.h"

namespace linnet {

inline View& view_at(void* base, size_t offset) { return *reinterpret_cast<View*>(static_cast<char*>(base) + offset); }
inline const View& view_at(const void* base, size_t offset) {
  return *reinterpret_cast<const View*>(static_cast<const char*>(base) + offset);
}
template <class T>
const T& value_at(const void* base, size_t offset) {
  return *reinterpret_cast<const T*>(static_cast<const char*>(base) + offset);
}
template <class T>
T& value_at(void* base, size_t offset) {
  return *reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

}  // namespace linnet
