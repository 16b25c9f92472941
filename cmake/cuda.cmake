# linnet_cuda_sources(target source...): compiles each *.cu ahead of time into an image that target carries, where there is an
# nvcc. An image is named by the path of its source below src/mechanisms (or src): recurrence/cuda/delta/walk_bf16.
# src/core/cuda/driver.h loads the images through the driver at run time: the library links nothing of CUDA. An image is a cubin inside
# a compressed fatbin, a fifth of its size; the driver unpacks it when it is loaded.
# Images are grouped by the first folder of their names. A source that launches kernels names its group (LINNET_USES_IMAGES of
# src/core/cuda/driver.h), which brings the group into a program; the table below only knows those that are there. So a program that
# links one mechanism statically carries no image of another.
# The variable LINNET_CUDA_IMAGES of the environment names a folder of images that were just compiled from the same sources.
find_program(LINNET_NVCC nvcc HINTS /usr/local/cuda/bin)
if(LINNET_NVCC)
  set(found ON)
else()
  set(found OFF)
endif()
find_program(LINNET_FATBINARY fatbinary HINTS /usr/local/cuda/bin)
option(LINNET_CUDA "compile the CUDA kernels (needs nvcc 12.3 or newer)" ${found})
# Sources with Hopper's instructions (wgmma, the copy engine, clusters, stmatrix, setmaxnreg) are compiled for sm_90a alone. The
# table of src/core/cuda/driver.h knows them as those that missing_on_hopper() is about.
set(LINNET_CUDA_HOPPER "/ptx/ptx_test_cuda.cu$|/bench/ceiling_cuda.cu$|/mamba/ssd_tile(_back)?_cuda.cu$|/softmax/cuda/hopper.cu$|/recurrence/cuda/(channel|delta|kda|tile)/|/recurrence/cuda/ring.cu$|/monarch/cuda/(tile/|cluster.cu$|head.cu$)")
set(LINNET_NVCC_FLAGS -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Werror=all-warnings --expt-relaxed-constexpr)
# All others are for every GPU since Ampere: one front end for compute_80, machine code for each of these (that of 80 runs on 86
# and 89, too), and PTX for what comes later, compressed in one image.
set(LINNET_CUDA_ARCHS "80;90;100;120" CACHE STRING "compute capabilities of the portable kernels")
# Rows that run only what no other row takes are machine code for Hopper, and PTX that other GPUs' drivers compile when a call first
# needs it: a wheel of 40 MB has no room for more.
set(LINNET_CUDA_RARE "/features/features_cuda.cu$|/zeros/cuda/softmax.cu$|/inline/inline_residual_cuda.cu$|/grid_conv/|/recurrence/cuda/(plain/plain|segments|step).cu$|/hierarchical/cuda/|/taylor/taylor_qt_cuda.cu$|/h3/h3_cuda.cu$|/distill/cuda/|/monarch/cuda/plain/backward.cu$")
set(LINNET_PORTABLE_FLAGS -std=c++20 -O3 -arch=compute_80 -Werror=all-warnings --expt-relaxed-constexpr)
find_program(LINNET_PTXAS ptxas HINTS /usr/local/cuda/bin)

set(LINNET_FATBINARY_FLAGS --64 --compress-all)
if(LINNET_FATBINARY)
  execute_process(COMMAND ${LINNET_FATBINARY} --help OUTPUT_VARIABLE help ERROR_QUIET)
  if(help MATCHES "compress-mode")  # from CUDA 12.8 on
    list(APPEND LINNET_FATBINARY_FLAGS --compress-mode=size)
  endif()
endif()

function(linnet_cuda_sources target)
  set(declarations "")
  set(groups "")
  set(rows "")
  set(count 0)
  if(LINNET_CUDA)
    if(NOT LINNET_NVCC OR NOT LINNET_FATBINARY OR NOT LINNET_PTXAS)
      message(FATAL_ERROR "LINNET_CUDA is ON, but there is no nvcc with its fatbinary and ptxas: install the CUDA toolkit, or configure with -DLINNET_CUDA=OFF")
    endif()
    foreach(source ${ARGN})
      string(REGEX REPLACE "^${CMAKE_SOURCE_DIR}/src/(mechanisms/)?(.*)\\.cu$" "\\2" name ${source})
      string(REPLACE "/" "_" symbol linnet_${name})
      set(image ${CMAKE_BINARY_DIR}/cuda/${name}.fatbin)
      set(cubin ${CMAKE_BINARY_DIR}/cuda/${name}.cubin)
      if(EXISTS "$ENV{LINNET_CUDA_IMAGES}/${name}.fatbin")
        set(image "$ENV{LINNET_CUDA_IMAGES}/${name}.fatbin")
      elseif(NOT source MATCHES "${LINNET_CUDA_HOPPER}")
        set(ptx ${CMAKE_BINARY_DIR}/cuda/${name}.ptx)
        set(assemble "")
        set(parts --image3=kind=ptx,sm=80,file=${ptx})
        set(files ${ptx})
        set(archs ${LINNET_CUDA_ARCHS})
        if(source MATCHES "${LINNET_CUDA_RARE}")
          set(archs 90)
        endif()
        foreach(arch ${archs})
          set(file ${CMAKE_BINARY_DIR}/cuda/${name}.${arch}.cubin)
          if(arch STREQUAL 90)
            set(file ${cubin})  # that tests compare launches with
          endif()
          list(APPEND assemble COMMAND ${LINNET_PTXAS} -O3 -arch=sm_${arch} -o ${file} ${ptx})
          list(APPEND parts --image3=kind=elf,sm=${arch},file=${file})
          list(APPEND files ${file})
        endforeach()
        add_custom_command(OUTPUT ${image} BYPRODUCTS ${files} DEPENDS ${source} ${CMAKE_SOURCE_DIR}/cmake/nvcc.sh
          COMMAND ${CMAKE_SOURCE_DIR}/cmake/nvcc.sh ${LINNET_NVCC} ${LINNET_PORTABLE_FLAGS} -I${CMAKE_SOURCE_DIR}/src -ptx
            -MD -MF ${image}.d -MT ${image} -o ${ptx} ${source}
          ${assemble}
          COMMAND ${LINNET_FATBINARY} ${LINNET_FATBINARY_FLAGS} --create=${image} ${parts}
          DEPFILE ${image}.d COMMENT "Building CUDA image ${name}.fatbin" VERBATIM)
      else()
        add_custom_command(OUTPUT ${image} BYPRODUCTS ${cubin} DEPENDS ${source} ${CMAKE_SOURCE_DIR}/cmake/nvcc.sh
          COMMAND ${CMAKE_SOURCE_DIR}/cmake/nvcc.sh ${LINNET_NVCC} ${LINNET_NVCC_FLAGS} -I${CMAKE_SOURCE_DIR}/src -cubin
            -MD -MF ${image}.d -MT ${image} -o ${cubin} ${source}
          COMMAND ${LINNET_FATBINARY} ${LINNET_FATBINARY_FLAGS} --create=${image} --image3=kind=elf,sm=90a,file=${cubin}
          DEPFILE ${image}.d COMMENT "Building CUDA image ${name}.fatbin" VERBATIM)
      endif()
      linnet_embed(${target} ${symbol} ${image})
      string(APPEND declarations "extern \"C\" [[gnu::weak]] const char ${symbol}_begin[];\n")
      string(APPEND rows "  if (std::strcmp(name, \"${name}\") == 0) return ${symbol}_begin;\n")
      math(EXPR count "${count} + 1")
    endforeach()
  endif()
  foreach(source ${ARGN})  # without nvcc a group is empty
    string(REGEX REPLACE "^${CMAKE_SOURCE_DIR}/src/(mechanisms/)?([^/]*)/.*" "\\2" group ${source})
    string(REGEX REPLACE "^${CMAKE_SOURCE_DIR}/src/(mechanisms/)?(.*)\\.cu$" "\\2" name ${source})
    string(REPLACE "/" "_" symbol linnet_${name})
    list(APPEND groups ${group})
    if(LINNET_CUDA)
      string(APPEND declared_${group} "extern \"C\" const char ${symbol}_begin[];\n")
      string(APPEND listed_${group} "${symbol}_begin, ")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES groups)
  foreach(group ${groups})
    set(file ${CMAKE_BINARY_DIR}/cuda/images_${group}.cc)
    file(CONFIGURE OUTPUT ${file} CONTENT "${declared_${group}}
extern \"C\" const char* const linnet_images_${group}[];
const char* const linnet_images_${group}[] = {${listed_${group}}nullptr};
")
    target_sources(${target} PRIVATE ${file})
  endforeach()
  set(table ${CMAKE_BINARY_DIR}/cuda/images.cc)
  file(CONFIGURE OUTPUT ${table} CONTENT "#include \"core/cuda/images.h\"

#include <cstring>

${declarations}
namespace linnet::cuda {
int image_count() { return ${count}; }
const char* find_image([[maybe_unused]] const char* name) {
${rows}  return nullptr;
}
}  // namespace linnet::cuda
")
  target_sources(${target} PRIVATE ${table})
endfunction()
