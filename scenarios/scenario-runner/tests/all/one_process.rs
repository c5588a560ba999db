//! The scenarios with ranks that are threads of one process, as in a process with several GPUs.

use crate::common::{child, dist, must_pass, role};
use ferrogin_test_support::wait::HANG_LIMIT;
use mini_nccl::Bootstrap;
use scenario_runner::runner::CpuThreads;
use scenario_runner::scenario::{self, SCENARIOS};
use scenario_runner::world::{Config, World};

#[test]
fn scenarios_pass_between_threads() {
    if role().is_some() {
        return run_ranks(3);
    }
    let Some(dist) = dist("scenarios_pass_between_threads") else { return };
    // In a child process, because the plugin reads its settings from the environment.
    must_pass(&child(&dist, "scenarios_pass_between_threads", "all ranks", 1).run().expect("the job starts"));
}

fn run_ranks(nranks: usize) {
    let config = Config { deadline: HANG_LIMIT, ..Config::from_env() };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = Bootstrap::threads(nranks, HANG_LIMIT)
            .into_iter()
            .map(|bootstrap| {
                let config = &config;
                scope.spawn(move || {
                    let world = World::open(config, bootstrap, Box::new(CpuThreads)).expect("the ranks connect");
                    for one in SCENARIOS {
                        scenario::run(&world, one, 200).expect(one.name);
                    }
                    world.close().expect("teardown");
                })
            })
            .collect();
        for rank in ranks {
            rank.join().expect("no rank panics");
        }
    });
}
