// `concerto inspect`: looks into what a run did.
#pragma once

namespace CLI {
class App;
}

namespace concerto {

void add_inspect_command(CLI::App& app);
void add_inspect_load(CLI::App& inspect);     // `concerto inspect load RUNDIR`
void add_inspect_routing(CLI::App& inspect);  // `concerto inspect routing --model DIR --prompt TEXT`

}  // namespace concerto
