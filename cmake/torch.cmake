# The torch operators: build/python/linnet/liblinnet_torch.so, beside links to the package's sources, so that
# PYTHONPATH=build/python imports the package as it would be installed.
#
# PyTorch's stable ABI with target 2.11: one binary serves every torch from 2.11 on, whichever one it was built with. Only headers
# and the name libtorch_cpu.so are taken from LINNET_PYTHON's torch.
set(LINNET_TORCH_TARGET 2.11)
if(SKBUILD)  # a build by pip, with its Python
  set(LINNET_PYTHON ${Python_EXECUTABLE})
endif()
set(find_torch [[
import importlib.util, pathlib, re, sys
spec = importlib.util.find_spec("torch")  # found, not imported: that takes seconds
if spec is None or not spec.submodule_search_locations:
    sys.exit("there is no torch in " + sys.executable)
folder = pathlib.Path(spec.submodule_search_locations[0])
version = re.search(r"__version__\s*=\s*['\"]([0-9.]+[0-9])", (folder / "version.py").read_text()).group(1)
print(folder.as_posix() + ";" + version, end="")
]])
foreach(flag -B -I)  # -I: without the PYTHONPATH by which pip hides the environment from a build
  execute_process(COMMAND ${LINNET_PYTHON} ${flag} -c "${find_torch}"
    OUTPUT_VARIABLE found ERROR_VARIABLE problem RESULT_VARIABLE failed)
  if(NOT failed)
    break()
  endif()
endforeach()
if(failed)
  message(FATAL_ERROR "The torch operators need torch ${LINNET_TORCH_TARGET} or newer in ${LINNET_PYTHON}, whose headers they are built with: "
    "${problem}Install torch there first (pip install torch), or build without the operators: -DLINNET_TORCH=OFF.")
endif()
list(GET found 0 torch_folder)
list(GET found 1 torch_version)
if(torch_version VERSION_LESS LINNET_TORCH_TARGET)
  message(FATAL_ERROR "The torch operators need torch ${LINNET_TORCH_TARGET} or newer, ${LINNET_PYTHON} has ${torch_version}")
endif()
message(STATUS "torch ${torch_version} in ${torch_folder}")

file(GLOB LINNET_TORCH_SOURCES CONFIGURE_DEPENDS src/torch/*.cc)
list(FILTER LINNET_TORCH_SOURCES EXCLUDE REGEX "_test\\.cc$")
add_library(linnet_torch MODULE ${LINNET_TORCH_SOURCES})
target_include_directories(linnet_torch SYSTEM PRIVATE ${torch_folder}/include)
target_compile_definitions(linnet_torch PRIVATE TORCH_TARGET_VERSION=0x020B000000000000)
target_link_libraries(linnet_torch PRIVATE linnet_shared linnet_flags linnet_hidden ${torch_folder}/lib/libtorch_cpu.so)
# liblinnet.so is found in the package itself. No path into this torch: `import torch` has loaded libtorch_cpu.so before.
set_target_properties(linnet_torch PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN"
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/python/linnet)
target_link_options(linnet_torch PRIVATE -Wl,--as-needed)
add_custom_command(TARGET linnet_torch POST_BUILD COMMAND ${CMAKE_COMMAND} -E create_symlink
  $<TARGET_FILE:linnet_shared> ${CMAKE_BINARY_DIR}/python/linnet/$<TARGET_SONAME_FILE_NAME:linnet_shared> VERBATIM)

# What editors and type checkers know of the operators. -I -S: nothing but the standard library is needed.
add_custom_command(TARGET linnet_torch POST_BUILD COMMAND ${LINNET_PYTHON} -B -I -S ${CMAKE_SOURCE_DIR}/tools/make_reference.py stub
  $<TARGET_FILE:linnet_shared> ${CMAKE_BINARY_DIR}/python/linnet/__init__.pyi VERBATIM)

file(GLOB LINNET_PYTHON_SOURCES RELATIVE ${CMAKE_SOURCE_DIR} CONFIGURE_DEPENDS python/linnet/*.py
  python/linnet/convert/*.py python/linnet/py.typed)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/python/linnet ${CMAKE_BINARY_DIR}/python/linnet/convert)
foreach(source ${LINNET_PYTHON_SOURCES})
  file(CREATE_LINK ${CMAKE_SOURCE_DIR}/${source} ${CMAKE_BINARY_DIR}/${source} SYMBOLIC)
endforeach()

if(SKBUILD)  # what pip puts into the wheel, beside the package's Python files
  install(TARGETS linnet_shared linnet_torch LIBRARY DESTINATION linnet COMPONENT wheel)
  install(FILES ${CMAKE_BINARY_DIR}/python/linnet/__init__.pyi DESTINATION linnet COMPONENT wheel)
  set_target_properties(linnet_command PROPERTIES INSTALL_RPATH "$ORIGIN/..")
  install(TARGETS linnet_command RUNTIME DESTINATION linnet/bin COMPONENT wheel)  # started by python/linnet_command
endif()
