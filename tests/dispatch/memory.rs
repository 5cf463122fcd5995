use super::*;

/// The most memory that a run of so many ids takes, in KiB, as the kernel tells it until shortly before the end.
async fn peak(ids: usize) -> u64 {
    let server = Sim::new(Config::new(Dialect::Anthropic).unlimited(true).latency(Latency::new(1.0, 0.0)).org(org(0)));
    let server = server.unwrap().serve().await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let orgs = format!(
        "dialect = \"anthropic\"\nbase_url = \"{}\"\n[[org]]\nname = \"first\"\nkey = \"{}\"\ncap = 20\n",
        server.base_url(),
        KEYS[0]
    );
    std::fs::write(dir.path().join("orgs.toml"), orgs).unwrap();
    let text: String = (0..ids)
        .map(|id| {
            let params = json!({ "model": "claude-sonnet-4-5", "max_tokens": 4_096, "messages": [], "n": id });
            format!("{}\n", json!({ "custom_id": format!("id-{id}"), "params": params }))
        })
        .collect();
    std::fs::write(dir.path().join("in.jsonl"), text).unwrap();
    let mut command = command(&["--quiet", "--input", "in.jsonl", "--output", "out.jsonl", "--orgs", "orgs.toml"]);
    let mut child = command.current_dir(dir.path()).stderr(Stdio::piped()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id().unwrap());
    let mut peak = 0;
    let ended = loop {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        peak = line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(peak);
        tokio::select! {
            ended = child.wait() => break ended.unwrap(),
            // The kernel keeps the peak: how often it is asked decides nothing.
            () = tokio::time::sleep(std::time::Duration::from_millis(5)) => {}
        }
    };
    assert!(ended.success());
    assert_eq!(std::fs::read_to_string(dir.path().join("out.jsonl")).unwrap().lines().count(), ids);
    assert_eq!(server.truth().answered_once, ids as u64);
    peak
}

#[tokio::test(flavor = "multi_thread")]
async fn b127_b130_memory_does_not_grow_with_the_ids() {
    // What of each id is kept until the journal's index takes it is bounded too, and small beside this.
    let (few, many) = (peak(1_000).await, peak(8_000).await);
    println!("{few} KiB with 1,000 ids, {many} KiB with 8,000");
    assert!(few > 5_000, "{few} KiB: it was looked at");
    assert!(many < few + 7_000, "{few} KiB with 1,000 ids, {many} KiB with 8,000: a KiB for each is too much");
}
