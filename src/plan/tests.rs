use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::dialect::Resource;

const MODEL: &str = "claude-sonnet-4-5";

fn limits(rpm: f64, otpm: f64, cap: usize) -> Limits {
    let limits = Limits::new().cap(cap).burst(Duration::from_secs(10));
    limits.per_minute(Resource::Requests, rpm).per_minute(Resource::OutputTokens, otpm)
}

fn fleet(orgs: &[Limits]) -> Fleet {
    let each = orgs.iter().enumerate();
    let fleet = each.fold(Fleet::new(), |fleet, (nth, limits)| {
        fleet.org(OrgPlan::new(format!("org-{nth}")).serves(MODEL, limits.clone()))
    });
    fleet.price(MODEL, Price::per_million(3.0, 15.0))
}

fn three() -> Fleet {
    fleet(&[limits(30_000.0, 1e6, 100), limits(90_000.0, 8e5, 100), limits(30_000.0, 1.2e6, 100)])
}

fn work(n: u64, objective: Objective) -> Workload {
    Workload::new(n, MODEL).objective(objective)
}

fn hours(hours: f64) -> Duration {
    Duration::from_secs_f64(hours * 3_600.0)
}

fn s(duration: Duration) -> f64 {
    duration.as_secs_f64()
}

/// A direct run's time is what slots allow, what the start costs and what the end does.
#[test]
fn where_slots_bind_the_time_is_littles_law_and_the_ends() {
    let one = fleet(&[Limits::new().cap(100)]);
    let plan = plan(&work(2_500, Objective::Latency), &one).unwrap();
    assert_eq!(plan.binds, Binds::Concurrency { org: "org-0".to_owned() });
    let mean = 1.52 * (0.507_f64.powi(2) / 2.0).exp();
    let steady = 2_500.0 * mean / 100.0;
    let took = s(plan.time.median);
    assert!((steady + 2.0 * mean..steady + 5.0 * mean).contains(&took), "{took} for {steady}");
    assert!(plan.time.p10 < plan.time.median && plan.time.median < plan.time.p90);
    assert_eq!(plan.orgs, [OrgShare { name: "org-0".to_owned(), concurrency: 100, batches: 0 }]);
}

#[test]
fn each_quota_binds_where_it_is_the_least() {
    let base = || Limits::new().cap(1_000).burst(Duration::from_secs(1));
    for (resource, per_minute, name) in [
        (Resource::Requests, 600.0, "requests"),
        (Resource::InputTokens, 600.0 * 260.0, "input tokens"),
        (Resource::OutputTokens, 600.0 * 160.0, "output tokens"),
        (Resource::Tokens, 600.0 * 420.0, "tokens"),
    ] {
        let plan = plan(&work(3_000, Objective::Latency), &fleet(&[base().per_minute(resource, per_minute)])).unwrap();
        assert_eq!(plan.binds.name(), name);
        // Ten a second, and ten at once.
        assert!((297.0..310.0).contains(&s(plan.time.median)), "{name}: {:?}", plan.time);
    }
    let held = three().client_rate(20.0);
    let slow = plan(&work(3_000, Objective::Latency), &held).unwrap();
    assert_eq!(slow.binds, Binds::Client);
    assert!((149.0..160.0).contains(&s(slow.time.median)), "{:?}", slow.time);
    assert_eq!(plan(&work(10, Objective::Latency), &three()).unwrap().binds, Binds::Latency);
    assert_eq!(plan(&work(0, Objective::Latency), &three()).unwrap().binds, Binds::Nothing);
}

#[test]
fn a_deep_bucket_is_spent_first() {
    let deep = |burst| fleet(&[Limits::new().cap(1_000).per_minute(Resource::Requests, 600.0).burst(burst)]);
    let time =
        |burst| s(plan(&work(1_000, Objective::Latency), &deep(Duration::from_secs(burst))).unwrap().time.median);
    assert!((time(1) - time(60) - 59.0).abs() < 5.0, "{} and {}", time(1), time(60));
}

// What decides.

#[test]
fn the_earlier_rules_for_small_and_large_hold() {
    let route = |n, objective| plan(&work(n, objective), &three()).unwrap().route;
    assert_eq!(route(100, Objective::Cost), Route::Direct, "a tiny job is not worth a batch, whatever is saved");
    assert_eq!(route(100, Objective::Balanced), Route::Direct);
    assert_eq!(route(50_000, Objective::Cost), Route::Batch);
    assert_eq!(route(50_000, Objective::Latency), Route::Direct);
    let soon = work(50_000, Objective::Cost).deadline(hours(0.5));
    assert_ne!(plan(&soon, &three()).unwrap().route, Route::Batch, "a near deadline");
    let none = Fleet { orgs: vec![OrgPlan::new("a").serves(MODEL, Limits::new()).batches(0)], ..three() };
    let only = plan(&work(50_000, Objective::Cost), &none).unwrap();
    assert_eq!((only.route, only.batch), (Route::Direct, None));
}

#[test]
fn batches_are_at_half_the_price() {
    let never = BatchModel::default().wedge_rows(f64::INFINITY);
    let cheap = plan(&work(10_000, Objective::Cost), &three().batch(never)).unwrap();
    assert!((cheap.cost.unwrap() / cheap.direct.cost.unwrap() - 0.5).abs() < 1e-9);
    // 260 in at 3 and 160 out at 15 dollars a million.
    assert!((cheap.direct.cost.unwrap() - 10_000.0 * (260.0 * 3.0 + 160.0 * 15.0) / 1e6).abs() < 1e-6);
    // What is expected to be wedged is paid in full.
    let wedged = plan(&work(10_000, Objective::Cost), &three()).unwrap();
    assert!((0.5..0.51).contains(&(wedged.cost.unwrap() / wedged.direct.cost.unwrap())));
}

#[test]
fn the_time_of_batches_is_that_of_their_passes_and_then_of_a_wedged_one() {
    let never = BatchModel::default().wedge_rows(f64::INFINITY);
    let time = |n, batch: &BatchModel| plan(&work(n, Objective::Cost), &three().batch(batch.clone())).unwrap();
    // Polls included, without wedges the chunk is larger; one batch a lane takes as long as the slowest of them.
    let one = time(500, &never.clone().chunk(500));
    assert_eq!((one.chunk, one.binds.clone()), (Some(500), Binds::BatchTurnaround));
    assert!((300.0..400.0).contains(&s(one.time.median)), "{:?}", one.time);
    let full = time(6_000, &never.clone().chunk(500));
    assert!((1.8..3.0).contains(&(s(full.time.median) / s(one.time.median))), "the slowest of twelve: {:?}", full.time);
    let many = time(60_000, &never.chunk(500));
    assert_eq!(many.binds, Binds::BatchesInFlight);
    assert!((3_600.0..4_800.0).contains(&s(many.time.median)), "ten passes of 6.7 min: {:?}", many.time);
    let large = time(100_000, &BatchModel::default());
    assert_eq!((large.chunk, large.binds), (Some(1_000), Binds::WedgedBatch));
    assert!(large.time.median > hours(4.0), "{:?}", large.time);
    assert!(time(10_000, &BatchModel::default()).time.p90 > hours(4.0), "one in ten, at eleven in a hundred");
}

#[test]
fn batches_of_eight_thousand_are_seen_to_starve() {
    let time =
        |rows| plan(&work(24_000, Objective::Cost), &three().batch(BatchModel::default().chunk(rows))).unwrap().time;
    assert!(time(8_000).mean > time(1_000).mean.mul_f64(2.0), "{:?} and {:?}", time(8_000), time(1_000));
}

#[test]
fn where_the_queue_is_short_batches_are_smaller_or_fewer() {
    let of = |rows| {
        let mut fleet = three();
        fleet.orgs.iter_mut().for_each(|org| org.queue_rows = rows);
        plan(&work(50_000, Objective::Cost), &fleet).unwrap()
    };
    let (short, long) = (of(1_000), of(100_000));
    assert!(short.chunk < long.chunk && short.time.median > long.time.median);
    for plan in [&short, &long] {
        let rows = |org: &OrgShare| org.batches as u64 * plan.chunk.unwrap();
        assert!(plan.orgs.iter().all(|org| rows(org) <= if plan == &short { 900 } else { 90_000 }), "{plan:?}");
    }
    // Room for one batch of 800 of two.
    let mut one = three().batch(BatchModel::default().chunk(800).wedge_rows(f64::INFINITY));
    one.orgs.iter_mut().for_each(|org| (org.queue_rows, org.batches) = (2_000, 2));
    one.orgs[0].queue_rows = 1_000;
    let plan = plan(&work(50_000, Objective::Cost), &one).unwrap();
    assert_eq!((plan.binds, plan.orgs[0].batches, plan.orgs[1].batches), (Binds::BatchQueue, 1, 2));
}

// Deadlines.

#[test]
fn a_deadline_that_batches_miss_is_met_by_both_ways() {
    // Direct alone takes 83 min, batches alone five hours and more.
    let slow = fleet(&[limits(600.0, 1e9, 100)]).batch(BatchModel::default().wedge_rows(f64::INFINITY).chunk(1_000));
    let both = plan(&work(50_000, Objective::Cost).deadline(hours(1.5)), &slow).unwrap();
    let Route::Split { direct, batch } = both.route else { panic!("{both}") };
    assert_eq!(direct + batch, 50_000);
    assert!(both.time.p90 <= hours(1.5) && both.binds == Binds::Deadline, "{both}");
    assert!(both.cost.unwrap() < both.direct.cost.unwrap());
    // Neither way alone is in time, both are.
    let tight = plan(&work(50_000, Objective::Latency).deadline(hours(1.25)), &slow).unwrap();
    assert!(matches!(tight.route, Route::Split { .. }) && tight.time.p90 <= hours(1.25), "{tight}");
    let error = plan(&work(50_000, Objective::Latency).deadline(hours(0.2)), &slow).unwrap_err();
    let PlanError::Deadline { soonest, .. } = &error else { panic!("{error}") };
    assert_eq!((soonest.route, soonest.binds.name()), (Route::Direct, "requests"));
    assert!(error.to_string().contains("12 min"), "{error}");
}

#[test]
fn the_reason_is_one_line_and_has_the_figures() {
    let plan = plan(&work(50_000, Objective::Balanced), &three()).unwrap();
    let line = plan.to_string();
    for part in [
        "N=50000 | ",
        "route=direct | ",
        "objective=balanced | ",
        "binds=concurrency (org-",
        "time=",
        "cost=$159.00 | ",
    ] {
        assert!(line.contains(part), "{line}");
    }
    assert_eq!(line.lines().count(), 1);
}

#[test]
fn what_cannot_be_meant_is_named() {
    let named = |work: Workload, fleet: Fleet| plan(&work, &fleet).unwrap_err().to_string();
    let w = || work(10, Objective::Cost);
    let with = |limits| fleet(&[limits]);
    for (error, name) in [
        (named(w().input(Tokens::fixed(f64::NAN)), three()), "input"),
        (named(w().output(Tokens::fixed(-1.0)), three()), "output"),
        (named(w().calls_a_row(0.5), three()), "calls_a_row"),
        (named(w(), with(Limits::new().cap(0))), "limits of org-0"),
        (named(w(), with(Limits::new().per_minute(Resource::Requests, 0.0))), "limits of org-0"),
        (named(w(), with(Limits::new().burst(Duration::ZERO))), "limits of org-0"),
        (named(w(), with(Limits::new().latency(Latency::new(hours(2.0), hours(1.0))))), "limits of org-0"),
        (named(w(), with(Limits::new().latency(Latency::default().tail(1.0, hours(1.0))))), "limits of org-0"),
        (named(w(), three().client_rate(0.0)), "client_rate"),
        (named(w(), three().price("x", Price::per_million(-1.0, 0.0))), "price of x"),
        (named(w(), three().batch(BatchModel::default().sigma(-1.0))), "batch sigma"),
        (named(w(), three().batch(BatchModel::default().wedge_rows(0.0))), "batch wedge_rows"),
        (named(w(), three().batch(BatchModel::default().discount(1.5))), "batch discount"),
        (named(w(), three().batch(BatchModel::default().chunk(0))), "batch chunk"),
        (named(Workload::new(1, "gpt-4o"), three()), "gpt-4o"),
        // A call of 160 tokens, and a bucket of a tenth of that.
        (named(w(), with(limits(600.0, 96.0, 10))), MODEL),
    ] {
        assert!(error.contains(name), "{error} does not name {name}");
    }
}

#[test]
fn an_org_serves_a_model_by_its_name_or_its_family() {
    let org = OrgPlan::new("a")
        .serves("claude-sonnet-4", Limits::new().cap(1))
        .serves("claude-sonnet-4-5", Limits::new().cap(2));
    let cap = |model| org.limits(model).map(|limits| limits.cap.unwrap());
    assert_eq!((cap("claude-sonnet-4-5"), cap("claude-sonnet-4-6"), cap("claude-opus-4-8")), (Some(2), Some(1), None));
}

// From what was measured.

#[test]
fn what_was_measured_replaces_what_was_assumed() {
    let (assumed, fleet) = (work(100_000, Objective::Latency), three());
    let ran = Measured::new(10_000, 10_500, Duration::from_secs(75))
        .latency(Duration::from_secs(3), Duration::from_secs(6))
        .latency_of("org-1", Duration::from_secs(1), Duration::from_secs(2))
        .tokens(520.0, 80.0);
    let (work, fleet) = ran.apply(&assumed, &fleet);
    assert_eq!((work.calls_a_row, work.input.mean, work.output.mean), (1.05, 520.0, 80.0));
    let p50 = |nth: usize| s(fleet.orgs[nth].models[0].1.latency.p50);
    assert_eq!((p50(0), p50(1), p50(2)), (3.0, 1.0, 3.0));
    assert_eq!(fleet.client_rate, None, "as quick as the orgs allow");
    assert_eq!(work.n, 100_000, "what is left to do is another matter");
}

#[test]
fn a_client_that_held_a_run_up_holds_up_the_next() {
    let ran = Measured::new(8_000, 8_000, Duration::from_secs(340));
    let (work, fleet) = ran.apply(&work(80_000, Objective::Latency), &three());
    assert!((fleet.client_rate.unwrap() - 8_000.0 / 340.0).abs() < 1e-9);
    let next = plan(&work, &fleet).unwrap();
    assert_eq!(next.binds, Binds::Client);
    assert!((3_400.0..3_450.0).contains(&s(next.time.median)), "{:?}", next.time);
    // What was in the way once need not be the next time.
    let quick = Measured::new(8_000, 8_000, Duration::from_secs(40));
    assert_eq!(quick.apply(&work, &fleet).1.client_rate, None);
}

// What must hold of any workload and fleet.

fn any_limits() -> impl Strategy<Value = Limits> {
    let quota = |chance: f64| proptest::option::weighted(chance, 60.0..30_000.0);
    let quotas = (quota(0.9), quota(0.5), quota(0.5));
    (1usize..200, 0.1..5.0, 0.1..0.9, quotas, 1.0..60.0).prop_map(|(cap, p50, sigma, quotas, burst)| {
        let latency = Latency::lognormal(Duration::from_secs_f64(p50), sigma);
        let (requests, input, output) = quotas;
        let mut limits = Limits::new().cap(cap).latency(latency).burst(Duration::from_secs_f64(burst));
        for (resource, limit, cost) in [
            (Resource::Requests, requests, 1.0),
            (Resource::InputTokens, input, 260.0),
            (Resource::OutputTokens, output, 160.0),
        ] {
            limits = limit.into_iter().fold(limits, |limits, limit| limits.per_minute(resource, limit * cost));
        }
        limits
    })
}

fn any_fleet() -> impl Strategy<Value = Fleet> {
    let batch =
        (30u64..900, 1u64..1_000, 0.1..0.9, 2_000.0..1e6, 1u64..8).prop_map(|(base, row, sigma, wedge, hours)| {
            BatchModel::default()
                .turnaround(Duration::from_secs(base), Duration::from_millis(row))
                .sigma(sigma)
                .wedge_rows(wedge)
                .stuck_after(Duration::from_secs(hours * 3_600))
        });
    let orgs = proptest::collection::vec((any_limits(), 0usize..8, 100u64..500_000), 1..4);
    (orgs, batch, proptest::option::weighted(0.2, 1.0..500.0)).prop_map(|(orgs, batch, client)| {
        let mut fleet = fleet(&orgs.iter().map(|org| org.0.clone()).collect::<Vec<_>>()).batch(batch);
        for (org, (_, batches, queue)) in fleet.orgs.iter_mut().zip(orgs) {
            (org.batches, org.queue_rows) = (batches, queue);
        }
        fleet.client_rate = client;
        fleet
    })
}

fn any_objective() -> impl Strategy<Value = Objective> {
    prop_oneof![Just(Objective::Latency), Just(Objective::Cost), Just(Objective::Balanced)]
}

/// Of one number and another; what is only rounding apart is the same.
fn no_more(a: Duration, b: Duration) -> bool {
    s(a) <= s(b) * 1.001 + 1e-3
}

/// How long the last of all in flight takes, with all slots taken, in seven runs of ten. Long calls are met more often than begun.
fn last_in_flight(limits: &Limits) -> f64 {
    let (mu, sigma) = limits.latency.spread().logarithm();
    let one_of = spread::normal_quantile(1.0 - 0.35 / limits.slots(MODEL) as f64);
    (mu + sigma * (sigma + one_of)).exp()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn more_calls_are_never_sooner_and_never_cheaper(fleet in any_fleet(), n in 1u64..200_000, more in 0u64..50_000) {
        // Some orgs may have no room for a call.
        let Ok(few) = plan(&work(n, Objective::Balanced), &fleet) else { return Ok(()) };
        let many = plan(&work(n + more, Objective::Balanced), &fleet).unwrap();
        prop_assert!(no_more(few.direct.time.median, many.direct.time.median), "{few} {many}");
        prop_assert!(no_more(few.direct.time.p90, many.direct.time.p90));
        prop_assert!(few.direct.cost <= many.direct.cost);
        if let (Some(few), Some(many)) = (few.batch, many.batch) {
            // How many are wedged is told apart by whole numbers where few are, and by quantiles where many are.
            prop_assert!(s(few.time.median) <= s(many.time.median) * 1.03, "{few:?} {many:?}");
            prop_assert!(few.cost <= many.cost);
        }
    }

    #[test]
    fn more_quota_more_slots_and_more_orgs_are_never_slower(
        fleet in any_fleet(), n in 1u64..200_000, org in any_limits(), factor in 1.0..4.0, which in 0usize..4,
    ) {
        let Ok(before) = plan(&work(n, Objective::Latency), &fleet) else { return Ok(()) };
        let mut richer = fleet.clone();
        match which {
            3 => richer = richer.org(OrgPlan::new("one more").serves(MODEL, org.clone())),
            2 => for org in &mut richer.orgs {
                let limits = &mut org.models[0].1;
                limits.cap = limits.cap.map(|cap| (cap as f64 * factor) as usize);
            },
            _ => for org in &mut richer.orgs {
                for limit in &mut org.models[0].1.per_minute {
                    *limit = limit.map(|limit| limit * factor);
                }
            },
        }
        let after = plan(&work(n, Objective::Latency), &richer).unwrap();
        // With more in flight at the end more may be late: by a long call at the slowest org. And an org that joins may be slow itself.
        let latencies = fleet.orgs.iter().flat_map(|org| &org.models).map(|(_, limits)| s(limits.latency.p95));
        let joined = if which == 3 { last_in_flight(&org) } else { 0.1 };
        let slack = 0.02 * s(before.direct.time.median) + latencies.fold(0.0, f64::max) + joined;
        prop_assert!(s(after.direct.time.median) <= s(before.direct.time.median) + slack, "{before}\n{after}");
    }

    #[test]
    fn a_deadline_is_kept_nine_times_in_ten_or_said_to_be_impossible(
        fleet in any_fleet(), n in 1u64..200_000, objective in any_objective(), seconds in 5u64..100_000,
    ) {
        let deadline = Duration::from_secs(seconds);
        match plan(&work(n, objective).deadline(deadline), &fleet) {
            Ok(plan) => prop_assert!(plan.time.p90 <= deadline, "{plan}"),
            Err(PlanError::Deadline { soonest, .. }) => {
                prop_assert!(soonest.direct.time.p90 > deadline, "{soonest}");
                let batch = soonest.batch.as_ref();
                prop_assert!(batch.is_none_or(|batch| batch.time.p90 > deadline || n < 200), "{soonest}");
            }
            Err(_) => {}
        }
    }

    #[test]
    fn no_batch_is_larger_than_the_provider_or_a_queue_takes(
        fleet in any_fleet(), n in 200u64..2_000_000, rows in 1u64..100_000, bytes in 100_000u64..500_000_000, prompt in 10.0..20_000.0,
    ) {
        let fleet = fleet.clone().batch(fleet.batch.most(rows, bytes));
        let work = work(n, Objective::Cost).input(Tokens::fixed(prompt));
        let Ok(plan) = plan(&work, &fleet) else { return Ok(()) };
        let Some(chunk) = plan.chunk else { return Ok(()) };
        prop_assert!(chunk <= rows.min(n) && chunk as f64 * prompt * 4.0 <= bytes as f64, "{chunk}");
        for share in &plan.orgs {
            let org = fleet.orgs.iter().find(|org| org.name == share.name).unwrap();
            prop_assert!(share.batches <= org.batches && share.batches as u64 * chunk <= org.queue_rows);
        }
    }

    #[test]
    fn balanced_goes_in_batches_from_the_crossover_on(fleet in any_fleet(), n in 200u64..2_000_000) {
        let Ok(plan_of_n) = plan(&work(n, Objective::Balanced), &fleet) else { return Ok(()) };
        let batches = plan_of_n.crossover.is_some_and(|from| n >= from);
        prop_assert_eq!(plan_of_n.route == Route::Batch, batches, "{}", plan_of_n);
        if let Some(from) = plan_of_n.crossover {
            prop_assert_eq!(plan(&work(from, Objective::Balanced), &fleet).unwrap().route, Route::Batch);
            if from > 200 {
                prop_assert_eq!(plan(&work(from - 1, Objective::Balanced), &fleet).unwrap().route, Route::Direct);
            }
        }
    }

    #[test]
    fn the_same_question_has_the_same_answer_and_its_quantiles_are_in_order(
        fleet in any_fleet(), n in 1u64..2_000_000, objective in any_objective(),
    ) {
        let Ok(one) = plan(&work(n, objective), &fleet) else { return Ok(()) };
        prop_assert_eq!(&one, &plan(&work(n, objective), &fleet).unwrap());
        for time in std::iter::once(one.direct.time).chain(one.batch.map(|batch| batch.time)) {
            prop_assert!(time.p10 <= time.median && time.median <= time.p90, "{time:?}");
            prop_assert!(time.p90 < Duration::MAX && !time.mean.is_zero());
        }
    }
}

#[test]
fn what_takes_for_ever_is_no_search_for_ever() {
    // A number so small is one above zero.
    let fleet = three().client_rate(f64::MIN_POSITIVE);
    for objective in [Objective::Latency, Objective::Cost, Objective::Balanced] {
        let plan = plan(&work(5_000_000, objective), &fleet).unwrap();
        assert_eq!(plan.direct.time.median, Duration::MAX, "{plan}");
    }
}
