# linnet_embed(target symbol file): the bytes of a file as `extern "C" const char <symbol>_begin[], <symbol>_end[]` in target.
# The assembler reads the file itself (.incbin): no array of numbers to compile.
function(linnet_embed target symbol file)
  set(source ${CMAKE_BINARY_DIR}/embed/${symbol}.cc)
  file(CONFIGURE OUTPUT ${source} CONTENT [[
asm(R"(
  .section .rodata
  .balign 64
  .global @symbol@_begin
  .hidden @symbol@_begin
@symbol@_begin:
  .incbin "@file@"
  .global @symbol@_end
  .hidden @symbol@_end
@symbol@_end:
  .byte 0
  .previous
)");
]] @ONLY)
  set_property(SOURCE ${source} APPEND PROPERTY OBJECT_DEPENDS ${file})
  target_sources(${target} PRIVATE ${source})
endfunction()
