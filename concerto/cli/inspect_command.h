// `concerto inspect`: looks into what a run did.
#pragma once

namespace CLI {
class App;
}

namespace concerto {

void add_inspect_command(CLI::App& app);
void add_inspect_load(CLI::App& inspect);  // `concerto inspect load RUNDIR`

}  // namespace concerto
