// The program: one subcommand a file. Errors end with their exit code and say what, where and how to mend it
// (docs/errors.md).
#include "concerto/cli/program.h"

int main(int argc, char** argv) {
  concerto::hold_standard_streams();
  return concerto::run_program(argc, argv);
}
