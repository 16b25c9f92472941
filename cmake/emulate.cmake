# linnet_emulated_gpu(source...): the emulated GPU for tests (docs/emulate.md): build/emulate/libcuda_emulated.so with the
# driver's functions, and beside it an image of every *.cu, compiled by the C++ compiler; without Monarch's cluster of blocks and what
# measures ceilings.
set(LINNET_EMULATED_FLAGS -std=c++20 -O2 -w -Wno-psabi -fPIC -mavx2 -mfma -ffp-contract=fast -fno-math-errno -fno-strict-aliasing
  -fsanitize=alignment,bounds -fsanitize-undefined-trap-on-error)

function(linnet_emulated_gpu)
  add_library(linnet_cuda_emulated SHARED ${CMAKE_SOURCE_DIR}/src/emulate/driver.cc ${CMAKE_SOURCE_DIR}/src/emulate/machine.cc
    ${CMAKE_SOURCE_DIR}/src/emulate/hopper.cc)
  target_include_directories(linnet_cuda_emulated PRIVATE ${CMAKE_SOURCE_DIR}/src)
  target_link_libraries(linnet_cuda_emulated PRIVATE linnet_flags ${CMAKE_DL_LIBS})
  set_target_properties(linnet_cuda_emulated PROPERTIES OUTPUT_NAME cuda_emulated LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/emulate)
  set(images "")
  foreach(source ${ARGN})
    if(source MATCHES "/bench/ceiling_cuda.cu$|/monarch/cuda/cluster.cu$")
      continue()
    endif()
    string(REGEX REPLACE "^${CMAKE_SOURCE_DIR}/(src/(mechanisms/)?|tests/emulate/)(.*)\\.cu$" "\\3" name ${source})
    set(image ${CMAKE_BINARY_DIR}/emulate/${name}.so)
    add_custom_command(OUTPUT ${image} DEPENDS ${source} ${CMAKE_SOURCE_DIR}/src/emulate/compile.sh
      COMMAND ${CMAKE_SOURCE_DIR}/src/emulate/compile.sh ${source} ${image} $<TARGET_FILE:linnet_cuda_emulated>
        ${CMAKE_CXX_COMPILER_LAUNCHER} ${CMAKE_CXX_COMPILER} ${LINNET_EMULATED_FLAGS} -I${CMAKE_SOURCE_DIR}/src/emulate/device
        -I${CMAKE_SOURCE_DIR}/src
      DEPFILE ${image}.d COMMENT "Building emulated image ${name}.so" VERBATIM)
    list(APPEND images ${image})
  endforeach()
  add_custom_target(linnet_emulated ALL DEPENDS linnet_cuda_emulated ${images})
endfunction()
