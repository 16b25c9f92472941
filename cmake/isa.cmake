# linnet_isa_sources(target source...): compiles each source once per instruction set into target.
#
# A source sees the macro LINNET_ISA (portable, avx2, avx512) and puts everything it defines into
# namespace linnet::LINNET_ISA. The choice happens at run time (src/core/isa.h).
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(LINNET_ISAS "portable;avx2;avx512" CACHE STRING "instruction sets to compile for: portable and any of avx2, avx512")
else()
  set(LINNET_ISAS portable)
endif()
set(LINNET_ISA_FLAGS_portable "")
set(LINNET_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(LINNET_ISA_FLAGS_avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512dq -mavx512bw -mavx512vl -mprefer-vector-width=512)

function(linnet_isa_sources target)
  foreach(isa ${LINNET_ISAS})
    if(ARGN)
      set(objects ${target}_${isa})
      add_library(${objects} OBJECT ${ARGN})
      target_compile_definitions(${objects} PRIVATE LINNET_ISA=${isa} LINNET_ISA_${isa}=1)
      target_compile_options(${objects} PRIVATE ${LINNET_ISA_FLAGS_${isa}})
      target_include_directories(${objects} PRIVATE ${CMAKE_SOURCE_DIR}/src)
      target_link_libraries(${objects} PRIVATE linnet_flags)
      target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
    endif()
    target_compile_definitions(${target} PUBLIC $<BUILD_INTERFACE:LINNET_HAS_${isa}=1>)
  endforeach()
endfunction()
