# cmake --install: the library, static and shared, with its headers (find_package(linnet), linnet.pc), the C header, the command
# and the licence.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/linnet)
set_target_properties(linnet_shared PROPERTIES EXPORT_NAME shared)
install(TARGETS linnet linnet_shared EXPORT linnet_targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY src/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/linnet
  FILES_MATCHING PATTERN "linnet.h" PATTERN "linnet_c.h" PATTERN "linnet_c_layers.h" PATTERN "linnet_c_runtime.h"
  PATTERN "core/args.h" PATTERN "core/executor.h" PATTERN "core/launch.h" PATTERN "core/op.h" PATTERN "core/status.h" PATTERN "core/tolerance.h" PATTERN "core/version.h"
  PATTERN "core/view.h"
  PATTERN "cli" EXCLUDE PATTERN "check" EXCLUDE
  PATTERN "bench" EXCLUDE PATTERN "compare" EXCLUDE PATTERN "report" EXCLUDE PATTERN "torch" EXCLUDE PATTERN "simd" EXCLUDE)
# The public headers of the mechanisms are those that linnet.h includes.
file(STRINGS ${CMAKE_SOURCE_DIR}/src/linnet.h lines REGEX "^#include \"mechanisms/")
foreach(line ${lines})
  string(REGEX REPLACE "^#include \"(.*)\"$" "\\1" header ${line})
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES src/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/linnet/${folder})
endforeach()
# Models: runtime.h and what it includes.
install(FILES src/runtime.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/linnet)
foreach(header chat sampler)
  install(FILES src/runtime/${header}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/linnet/runtime)
endforeach()
foreach(header bpe pretokenize tokenizer wordpiece)
  install(FILES src/runtime/tokenizer/${header}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/linnet/runtime/tokenizer)
endforeach()
# Layers: layers.h and what it includes.
install(FILES src/layers.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/linnet)
foreach(header layer map record runner memory state)
  install(FILES src/layers/${header}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/linnet/layers)
endforeach()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/linnet.h)
install(EXPORT linnet_targets NAMESPACE linnet:: DESTINATION ${package_dir})
file(WRITE ${CMAKE_BINARY_DIR}/linnet-config.cmake
  "include(CMakeFindDependencyMacro)\nfind_dependency(Threads)\ninclude(\${CMAKE_CURRENT_LIST_DIR}/linnet_targets.cmake)\n")
write_basic_package_version_file(${CMAKE_BINARY_DIR}/linnet-config-version.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${CMAKE_BINARY_DIR}/linnet-config.cmake ${CMAKE_BINARY_DIR}/linnet-config-version.cmake DESTINATION ${package_dir})
if(TARGET linnet_command)
  install(TARGETS linnet_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
configure_file(cmake/linnet.pc.in ${CMAKE_BINARY_DIR}/linnet.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/linnet.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
