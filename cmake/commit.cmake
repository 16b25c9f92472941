# cmake -DSOURCE=... -DOUTPUT=... -P commit.cmake: writes bench::commit() for the checkout in SOURCE. Run by every build; the
# file changes only when the commit does.
set(commit "unknown")
find_package(Git QUIET)
if(GIT_FOUND AND EXISTS ${SOURCE}/.git)
  execute_process(COMMAND ${GIT_EXECUTABLE} -C ${SOURCE} describe --always --dirty=+ --exclude=* --abbrev=10
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed)
    set(commit "${found}")
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#include \"bench/machine.h\"

namespace linnet::bench {
std::string commit() { return \"${commit}\"; }
}  // namespace linnet::bench
")
