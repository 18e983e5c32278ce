# Fails if an object built for a high instruction set defines an inline function outside its own namespace: the linker
# could keep that copy for code that runs on every processor. Given: NM, OBJECTS (separated by |).
string(REPLACE "|" ";" objects "${OBJECTS}")
foreach(object ${objects})
  execute_process(COMMAND ${NM} -C --defined-only ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[0-9a-f]+ [WVu] [^\n]*" shared "${symbols}")
  foreach(symbol ${shared})
    if(NOT symbol MATCHES "concerto::cpu::vector_")
      message(SEND_ERROR "${object}: ${symbol}")
    endif()
  endforeach()
endforeach()
