//! Ranks that are threads of one process, as with several GPUs in a process: one plugin, one card, and the scenarios.

mod common;

use common::{again, dist, must_pass, part};
use gpu_scenarios::runner::CpuThreads;
use gpu_scenarios::scenario::{self, SCENARIOS};
use gpu_scenarios::world::{Config, World};
use mini_nccl::Bootstrap;
use std::time::Duration;

#[test]
fn ranks_are_threads() {
    if part().is_some() {
        return run_ranks(3);
    }
    let Some(dist) = dist("ranks_are_threads") else { return };
    // A process of its own, for the settings are read from its environment.
    must_pass(&again(&dist, "ranks_are_threads", "all ranks", 1).run().expect("the job starts"));
}

fn run_ranks(nranks: usize) {
    let config = Config::from_env();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = Bootstrap::threads(nranks, Duration::from_secs(60))
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
