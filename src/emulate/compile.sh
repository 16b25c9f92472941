#!/bin/sh
# compile.sh SOURCE OUTPUT LIBRARY COMPILER FLAGS...: a .cu as a shared library whose kernels run on the emulated GPU (docs/emulate.md).
# Between the preprocessor and the compiler, shared memory that is declared without a size becomes a pointer to it, and every
# kernel gets a function NAME_emulated that runs one of its threads.
set -e
source=$1 output=$2 library=$3
shift 3
mkdir -p "$(dirname "$output")"
"$@" -E -x c++ -include emulate/device/cuda.h -MD -MF "$output.d" -MT "$output" -o "$output.raw" "$source"
kernels=$(grep -v '^#' "$output.raw" | tr '\n' ' ' | grep -o '__global__  *void  *[A-Za-z_0-9]*' | sed 's/.* //' | sort -u)
{
  sed -e 's/extern __shared__ \(__attribute__((aligned([0-9]*))) \)\{0,1\}\([a-z]*\) \([a-z]*\)\[\];/static \2* const \3 = linnet::emulate::dynamic_shared<\2>();/g' \
    -e 's/__shared__ \(alignas([0-9]*)\)/\1 __shared__/g' -e 's/__shared__/static thread_local/g' -e 's/__global__//g' "$output.raw"
  echo 'namespace linnet::cuda {} namespace linnet::ptx {}'
  echo 'using namespace linnet::cuda; using namespace linnet::ptx;'
  for kernel in $kernels; do
    echo "extern \"C\" void ${kernel}_emulated(void** parameters) { linnet::emulate::call(&$kernel, parameters); }"
  done
  # The variables of a thread exist once one of them was asked for.
  echo 'extern "C" void touch_emulated() { static thread_local volatile char one; one = 0; }'
} > "$output.cpp"
"$@" -fpreprocessed -c -o "$output.o" "$output.cpp"
"$@" -shared -o "$output" "$output.o" "$library"
rm -f "$output.raw" "$output.cpp" "$output.o"
