# Fails if an object built for a high instruction set defines an inline function outside its own namespace: the linker
# could keep that copy for code that runs on every processor. Given: NM, OBJECTS (separated by |).
string(REPLACE "|" ";" objects "${OBJECTS}")
foreach(object ${objects})
  execute_process(COMMAND ${NM} -C --defined-only ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE "[^\n]*concerto::cpu::vector_[^\n]*\n" "" symbols "${symbols}")
  if(symbols MATCHES "[0-9a-f]+ [WVu] [^\n]*")
    message(SEND_ERROR "${object}: ${CMAKE_MATCH_0}")
  endif()
endforeach()
