//! Who looks at metrics pages of running programs: `gpupool export` and `gpupool top` say what `ps` and the program's own C
//! interface do, of whoever runs, and of nobody else.

use gpupool_metrics::{Counter, Snapshot};
use harness::{Run, Running, artifact_folder, eventually, pages};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

const MIB: u64 = 1 << 20;

/// A program on two GPUs of 1 GiB each, which keeps nothing that is freed for others.
fn agent() -> Run {
    Run::program("agent").sim("2x1GiB").shim().env("GPUPOOL_HOST_LIMIT", "0")
}

/// The page of a program, once it tells of this.
#[track_caller]
fn page(what: &str, program: &Running, session: &Path, tells: impl Fn(&Snapshot) -> bool) -> Snapshot {
    eventually(&format!("{what} on the page"), || {
        pages(session).into_iter().filter(|told| told.process.identity.pid == program.pid()).find(&tells)
    })
}

/// The page of a program, once it tells of so many live bytes.
#[track_caller]
fn with_live(program: &Running, session: &Path, bytes: u64) -> Snapshot {
    page(&format!("{bytes} live bytes"), program, session, |told| {
        told.levels.live_bytes == bytes && !told.contexts.rows.is_empty()
    })
}

/// The command, which sees the pages of this session, and for root also those of everybody else on this machine.
fn gpupool(session: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(artifact_folder().join("gpupool"));
    command.args(arguments).env("XDG_RUNTIME_DIR", session).env("NO_COLOR", "1");
    command
}

/// What it prints.
#[track_caller]
fn said(session: &Path, arguments: &[&str]) -> String {
    let output = gpupool(session, arguments).output().unwrap_or_else(|e| panic!("gpupool: {e}"));
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Samples by what stands in front of their values.
fn samples(text: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let split = |line: &str| {
        let (name, value) = line.rsplit_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    lines.map(|line| split(line).unwrap_or_else(|| panic!("no sample: {line}"))).collect()
}

/// The part of the text that is of one process: what the labels in front of the others are.
fn labels_of(text: &str, pid: u32) -> Option<String> {
    let line = text.lines().find(|line| line.contains(&format!(",pid=\"{pid}\"")))?;
    let labels = line.strip_prefix("gpupool_process_info{")?;
    Some(labels.split_once(",pid=")?.0.to_owned())
}

/// Whether a line of a list is of this process.
fn is_row_of(line: &str, pid: &str) -> bool {
    line.split_whitespace().next() == Some(pid)
}

fn stop(mut child: Child, signal: i32) -> ExitStatus {
    // SAFETY: kill has no preconditions; the child was not waited for, so the number is its.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
    child.wait().unwrap_or_else(|e| panic!("lost it: {e}"))
}

/// What the summary at the end says of such memory.
#[test]
fn handles_that_had_no_room_on_their_gpu_are_borrowed_memory_to_all_who_look() {
    let mut program = Run::program("agent").sim("2x256MiB").shim().env("GPUPOOL_RESERVE", "16MiB").start(None);
    program.ask("init");
    for mib in [160, 100] {
        assert_eq!(program.ask(&format!("make {mib}")), "made");
    }
    let session = program.session();
    let told = page("handles on two GPUs", &program, &session, |told| told.levels.residence.on_peers > 0);
    let residence = told.levels.residence;
    let [near, far] = [residence.near / MIB, residence.on_peers / MIB];
    assert_eq!((near, far, residence.on_host), (160, 100, 0));
    let text = said(&session, &["ps"]);
    for line in ["gpu1 100.0 MiB of its own", "far: 100.0 MiB on other GPUs", "borrows: 100.0 MiB of gpu1 for gpu0"] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let samples = samples(&said(&session, &["export", "--once"]));
    let of = |family: &str| {
        samples.iter().filter(|(name, _)| name.starts_with(family)).map(|(_, v)| *v as u64 / MIB).sum::<u64>()
    };
    assert_eq!(of("gpupool_borrowed_bytes"), 100);
    let (status, _folder) = program.end();
    assert!(status.success(), "{status}");
}

/// An exporter on a port of its own, and where that is.
struct Exporter {
    child: Child,
    address: String,
}

impl Exporter {
    #[track_caller]
    fn start(session: &Path) -> Self {
        let mut command = gpupool(session, &["export", "--listen", "127.0.0.1:0"]);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap_or_else(|e| panic!("gpupool: {e}"));
        let mut stderr = BufReader::new(child.stderr.take().unwrap_or_else(|| panic!("no pipe to it")));
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap_or_else(|e| panic!("{e}"));
        let address =
            line.trim().strip_prefix("gpupool: metrics at http://").and_then(|at| at.strip_suffix("/metrics"));
        let address = address.unwrap_or_else(|| panic!("{line}")).to_owned();
        // What it says later goes nowhere, and does not stop it.
        std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
        Self { child, address }
    }

    /// What it answers to a request, head and all.
    #[track_caller]
    fn answer(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap_or_else(|e| panic!("{}: {e}", self.address));
        stream.write_all(request.as_bytes()).unwrap_or_else(|e| panic!("{e}"));
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap_or_else(|e| panic!("{e}"));
        answer
    }

    #[track_caller]
    fn metrics(&self) -> String {
        let answer = self.answer("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
        assert!(head.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"), "{head}");
        body.to_owned()
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_same_number_is_in_the_c_interface_ps_top_and_export() {
    let ranked = agent().env("LOCAL_RANK", "1").env("LOCAL_WORLD_SIZE", "2").env("GPUPOOL_DEVICES", "0,1");
    // What was freed stays, however long all of this takes.
    let mut program = ranked.env("GPUPOOL_IDLE", "off").start(None);
    program.ask("init");
    for size in [64, 1000, 200] {
        program.ask(&format!("allocate {size}"));
    }
    program.ask("free");
    let session = program.session();
    let own = program.ask("statistics");
    let own: Vec<u64> = own.split(' ').map(|number| number.parse().unwrap_or_else(|e| panic!("{own}: {e}"))).collect();
    // From then on nothing changes, so all that is asked below is of one moment.
    page("what the program is told of itself", &program, &session, |told| {
        let held = told.levels.places.rows.iter().map(|place| place.held).sum();
        let (blocks, live) = (told.levels.live_blocks, told.levels.live_bytes);
        let counted =
            [Counter::Allocations, Counter::Frees, Counter::AllocatedBytes].map(|counter| told.counter(counter));
        [blocks, live, held, 0, counted[0]] == own[..]
            && counted == [3, 1, 1264 * MIB]
            && !told.contexts.rows.is_empty()
    });
    let text = said(&session, &["export", "--once"]);
    let json: serde_json::Value =
        serde_json::from_str(&said(&session, &["ps", "--json"])).unwrap_or_else(|e| panic!("{e}"));
    let rows = json.as_array().unwrap_or_else(|| panic!("{json}"));
    let row = rows.iter().find(|row| row["process"]["identity"]["pid"] == program.pid());
    let row = row.unwrap_or_else(|| panic!("{json}"));
    let labels = labels_of(&text, program.pid()).unwrap_or_else(|| panic!("{text}"));
    assert!(labels.contains(r#"process="agent",rank="1",slot=""#), "{labels}");
    let samples = samples(&text);
    let exported = |name: &str, more: &str| {
        let key = format!("gpupool_{name}{{{labels}{more}}}");
        *samples.get(&key).unwrap_or_else(|| panic!("no {key} in\n{text}")) as u64
    };
    let held = |place: &str| {
        let places = row["levels"]["places"]["rows"].as_array();
        let found = places.into_iter().flatten().find(|row| row["place"] == place);
        let held = found.unwrap_or_else(|| panic!("{row}"))["held"].as_u64();
        let number: u32 = place[3..].parse().unwrap_or_else(|e| panic!("{place}: {e}"));
        let uuid = row["levels"]["gpus"]["rows"][number as usize]["uuid"].as_str().unwrap_or_default();
        let more = format!(",gpu=\"{uuid}\",place=\"{place}\"");
        assert_eq!(Some(exported("place_held_bytes", &more)), held, "{place}");
        exported("place_held_bytes", &more)
    };
    let told = [
        exported("live_blocks", ""),
        exported("live_bytes", ""),
        held("gpu0") + held("gpu1"),
        0,
        exported("allocations_total", ""),
    ];
    assert_eq!(told, own[..]);
    for (name, value) in [
        ("live_blocks", &row["levels"]["live_blocks"]),
        ("live_bytes", &row["levels"]["live_bytes"]),
        ("allocations_total", &row["counters"]["allocations"]),
        ("frees_total", &row["counters"]["frees"]),
        ("spilled_bytes_total", &row["counters"]["spilled_bytes"]),
    ] {
        assert_eq!(Some(exported(name, "")), value.as_u64(), "{name}");
    }
    assert!(exported("spilled_bytes_total", "") > 0 && exported("resident_bytes", ",residence=\"peers\"") > 0);
    let uuid = |gpu: usize| row["levels"]["gpus"]["rows"][gpu]["uuid"].as_str().unwrap_or_default();
    let loan = format!(",borrower=\"{}\",lender=\"{}\",place=\"gpu1\"", uuid(0), uuid(1));
    assert_eq!(exported("borrowed_bytes", &loan), exported("resident_bytes", ",residence=\"peers\""));
    let lines = row["sites"]["rows"].as_array().into_iter().flatten().filter(|site| site["memory"] == "device");
    let by_line: u64 = lines.filter_map(|site| site["live"].as_u64()).sum();
    assert_eq!(by_line, exported("live_bytes", ""), "every block is of some line: {row:#}");
    let top: serde_json::Value =
        serde_json::from_str(&said(&session, &["top", "--once", "--json"])).unwrap_or_else(|e| panic!("{e}"));
    let in_top = top["processes"].as_array().into_iter().flatten();
    let in_top = in_top.filter(|row| row["process"]["identity"]["pid"] == program.pid()).collect::<Vec<_>>();
    let [in_top] = in_top[..] else { panic!("{top}") };
    for part in ["process", "levels", "counters", "contexts", "sites", "findings", "labels"] {
        assert_eq!(in_top[part], row[part], "{part}");
    }
    let contexts = samples.iter().filter(|(key, _)| key.starts_with(&format!("gpupool_contexts{{{labels}")));
    assert_eq!(contexts.map(|(_, count)| *count).sum::<f64>(), 1.0);
}

/// The numbers of a page (`gpupool report --html`) by where they stand in `--json`.
fn numbers_of(page: &str) -> BTreeMap<String, u64> {
    let number = |text: &str| {
        let (value, rest) = text.split_once("\" data-of=\"")?;
        let (pointer, _) = rest.split_once("\">")?;
        Some((pointer.replace("&#x2f;", "/"), value.parse().ok()?))
    };
    page.split("<data value=\"").skip(1).filter_map(number).collect()
}

/// The last value of a line of the page, which is written as runs: value, length, ….
fn last_of(line: &Value) -> u64 {
    line.as_array().and_then(|runs| runs.iter().nth_back(1)).and_then(Value::as_u64).unwrap_or_else(|| panic!("{line}"))
}

/// A program with blocks near, on a peer and on the host, one at two places, some freed, some named, and pinned memory, at one moment: it
/// waits for its next order. What the driver's own numbers are is told by the C interface, and everything else says the same.
#[test]
fn at_one_moment_page_json_metrics_and_c_interface_say_the_same() {
    let run = agent().env("GPUPOOL_HOST_LIMIT", "1GiB").env("GPUPOOL_IDLE", "off").log();
    let mut program = run.start(None);
    for order in [
        "init",
        "allocate 3",
        "allocate 600",
        "label kv",
        "allocate 500",
        "label act",
        "allocate 3",
        "allocate 802",
        "allocate 1",
        "allocate 40",
        "allocate 96",
        "pin 8",
        "pin 3",
        "twice",
        "free",
    ] {
        program.ask(order);
    }
    let own: Value = serde_json::from_str(&program.ask("numbers")).unwrap_or_else(|e| panic!("{e}"));
    let number = |value: &Value, pointer: &str| {
        value.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {pointer} in {value:#}"))
    };
    let session = program.session();
    page("the last order", &program, &session, |told| {
        told.levels.live_bytes == number(&own, "/live_bytes")
            && told.levels.pinned.registered == MIB
            && told.findings.rows.len() == 1
    });
    let json = |arguments: &[&str]| -> Value {
        serde_json::from_str(&said(&session, arguments)).unwrap_or_else(|e| panic!("{arguments:?}: {e}"))
    };
    let listed = json(&["ps", "--json"]);
    let is_it = |row: &&Value| row["process"]["identity"]["pid"] == program.pid();
    let row = listed.as_array().into_iter().flatten().find(is_it).unwrap_or_else(|| panic!("{listed}"));
    let top = json(&["top", "--once", "--json"]);
    let in_top = top["processes"].as_array().into_iter().flatten().find(is_it).unwrap_or_else(|| panic!("{top}"));
    for part in ["levels", "counters", "contexts", "sites", "findings", "labels"] {
        assert_eq!(in_top[part], row[part], "{part}");
    }
    let text = said(&session, &["export", "--once"]);
    let (labels, samples) = (labels_of(&text, program.pid()).unwrap_or_else(|| panic!("{text}")), samples(&text));
    let exported = |name: &str, more: &str| {
        let key = format!("gpupool_{name}{{{labels}{more}}}");
        *samples.get(&key).unwrap_or_else(|| panic!("no {key} in\n{text}")) as u64
    };
    let log = program.log().display().to_string();
    let report = json(&["report", "--json", &log]);
    let process = &report["processes"][0];
    let file = session.join("page.html");
    // Where the addresses lie is in the log within a second.
    let (page, drawn) = eventually("all addresses on the page's map", || {
        said(&session, &["report", "--html", &file.display().to_string(), &log]);
        let page = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{e}"));
        let data = page.split("<script id=\"data\" type=\"application/json\">").nth(1);
        let data = data.and_then(|rest| rest.split("</script>").next()).unwrap_or_default();
        let drawn: Value = serde_json::from_str(data).unwrap_or_else(|e| panic!("{e}"));
        let moment = drawn["maps"][0]["moments"].as_array()?.last()?;
        let used: u64 = moment["places"].as_array()?.iter().filter_map(|place| place["used"].as_u64()).sum();
        let own: u64 = own["places"].as_object()?.values().filter_map(|place| place["used"].as_u64()).sum();
        (used == own).then_some((page, drawn))
    });
    let shown = numbers_of(&page);

    let (mut used, mut far) = (0, [0, 0]);
    let moment = drawn["maps"][0]["moments"].as_array().and_then(|moments| moments.last());
    for (index, place) in ["gpu0", "gpu1", "host0"].into_iter().enumerate() {
        let told = &own["places"][place];
        let on_page = &row["levels"]["places"]["rows"][index];
        let on_map = moment.and_then(|moment| moment["places"].as_array()?.iter().find(|one| one["place"] == place));
        let on_map = on_map.unwrap_or_else(|| panic!("{place} is not on the map of {drawn:#}"));
        assert_eq!(on_page["place"], place);
        let uuid = row["levels"]["gpus"]["rows"][index]["uuid"].as_str().map(|uuid| format!(",gpu=\"{uuid}\""));
        let at = format!("{},place=\"{place}\"", uuid.unwrap_or_default());
        for (name, in_report, in_map) in [
            ("used", "places", Some("used")),
            ("held", "held", Some("held")),
            ("peak_used", "", None),
            ("limit", "", None),
        ] {
            let value = number(told, &format!("/{name}"));
            assert_eq!(
                (value, value),
                (number(on_page, &format!("/{name}")), exported(&format!("place_{name}_bytes"), &at)),
                "{name} of {place}"
            );
            if !in_report.is_empty() {
                assert_eq!(
                    number(process, &format!("/memory/{in_report}/{place}/last")),
                    value,
                    "{name} of {place} in the report"
                );
            }
            if let Some(in_map) = in_map {
                assert_eq!(number(on_map, &format!("/{in_map}")), value, "{name} of {place} on the page's map");
            }
        }
        let peak = number(told, "/peak_used");
        assert_eq!(
            (
                number(process, &format!("/memory/places/{place}/peak")),
                shown[&format!("/processes/0/memory/places/{place}/peak")]
            ),
            (peak, peak)
        );
        used += number(told, "/used");
        if index > 0 {
            far[index - 1] = number(told, "/used");
        }
    }
    assert!(far[0] > 0 && far[1] > 0, "{own}");
    let all = [number(process, "/memory/all/last"), shown["/processes/0/memory/all/last"]];
    assert_eq!(all, [used; 2]);
    assert_eq!(
        number(&own, "/held_on_gpus") + number(&own, "/held_on_host"),
        exported_sum(&samples, &labels, "place_held_bytes")
    );

    for (name, page, exported_name) in [
        ("live_blocks", "/levels/live_blocks", "live_blocks"),
        ("live_bytes", "/levels/live_bytes", "live_bytes"),
        ("peak_live_bytes", "/levels/peak_live_bytes", "peak_live_bytes"),
        ("allocations", "/counters/allocations", "allocations_total"),
        ("reuses", "/counters/reuses", "reuses_total"),
        ("spilled_bytes", "/counters/spilled_bytes", "spilled_bytes_total"),
        ("trimmed_bytes", "/counters/trimmed_bytes", "trimmed_bytes_total"),
    ] {
        let value = number(&own, &format!("/{name}"));
        assert_eq!([number(row, page), exported(exported_name, "")], [value; 2], "{name}");
    }
    // Who holds it: by place in the program, in the report, on the page as drawn, and in the metrics.
    let live = number(&own, "/live_bytes");
    let at_end = |key: &str| -> u64 {
        let holders = process["holders"]["holders"].as_array().into_iter().flatten();
        holders.map(|holder| number(holder, &format!("/{key}"))).sum()
    };
    let lines = |key: &str| -> u64 {
        drawn["holders"]["list"].as_array().into_iter().flatten().map(|holder| last_of(&holder[key])).sum()
    };
    let sites = row["sites"]["rows"].as_array().into_iter().flatten().filter(|site| site["memory"] == "device");
    assert_eq!([at_end("at_end"), lines("line"), sites.map(|site| number(site, "/live")).sum()], [live; 3]);
    let far_bytes = number(&own, "/places/gpu1/bytes") + number(&own, "/places/host0/bytes");
    assert_eq!([at_end("far_at_end"), lines("far")], [far_bytes; 2]);
    // Where it lies as seen from its GPU, in frames.
    for (name, page, exported_name, bytes) in [
        ("near", "near", "near", number(&own, "/places/gpu0/used")),
        ("peers", "on_peers", "peers", far[0]),
        ("host", "on_host", "host", far[1]),
    ] {
        let told = [
            number(row, &format!("/levels/residence/{page}")),
            exported("resident_bytes", &format!(",residence=\"{exported_name}\"")),
            number(process, &format!("/memory/residence/{name}/last")),
        ];
        assert_eq!(told, [bytes; 3], "{name}");
    }
    let named = own["labels"].as_object().unwrap_or_else(|| panic!("{own}"));
    assert_eq!(named.len(), 2);
    for (name, told) in named {
        let rows = row["labels"]["rows"].as_array().into_iter().flatten();
        let on_page = rows.clone().find(|label| label["name"] == **name).unwrap_or_else(|| panic!("{row:#}"));
        for part in ["blocks", "bytes", "near", "on_peers", "on_host"] {
            assert_eq!(on_page[part], told[part], "{part} of {name}");
        }
        let line = drawn["names"].as_array().into_iter().flatten().find(|line| line["name"] == **name);
        let told = told["bytes"].as_u64();
        assert_eq!(
            [process["memory"]["labels"][name]["last"].as_u64(), line.map(|line| last_of(&line["line"]))],
            [told; 2],
            "{name}"
        );
    }
    // Pinned memory is not in the C interface; the program knows what it has pinned, and registered.
    for (name, in_report, bytes) in [("requested", "in_use", 12 * MIB), ("registered", "own", MIB)] {
        let exported = exported(&format!("pinned_{name}_bytes"), "");
        let pointer = format!("/pinned/levels/{in_report}/last");
        let told = [
            number(row, &format!("/levels/pinned/{name}")),
            exported,
            number(process, &pointer),
            shown[&format!("/processes/0{pointer}")],
        ];
        assert_eq!(told, [bytes; 4], "{name}");
    }
    let pinned = number(row, "/levels/pinned/pinned");
    assert!(pinned >= 12 * MIB);
    assert_eq!(
        [
            exported("pinned_bytes", ""),
            number(process, "/pinned/levels/pinned/last"),
            shown["/processes/0/pinned/levels/pinned/last"]
        ],
        [pinned; 3]
    );
    // The context, what it cost, and what was found.
    let cost = number(process, "/contexts/0/made/cost");
    let uuid = row["levels"]["gpus"]["rows"][0]["uuid"].as_str().unwrap_or_default();
    let told = [
        number(row, "/contexts/rows/0/cost"),
        exported("context_cost_bytes", &format!(",gpu=\"{uuid}\",place=\"gpu0\"")),
        shown["/processes/0/contexts/0/made/cost"],
    ];
    assert_eq!(told, [cost; 3]);
    assert_eq!(report["findings"][0]["code"], row["findings"]["rows"][0]["code"]);
}

/// The sum of a metric of a process over its other labels.
fn exported_sum(samples: &BTreeMap<String, f64>, labels: &str, name: &str) -> u64 {
    let of = samples.iter().filter(|(key, _)| key.starts_with(&format!("gpupool_{name}{{{labels}")));
    of.map(|(_, value)| *value as u64).sum()
}

#[test]
fn a_scrape_tells_of_those_that_run_now() {
    let mut first = agent().start(None);
    first.ask("init");
    first.ask("allocate 64");
    let session = first.session();
    let mut second = agent().start(Some(&session));
    second.ask("init");
    second.ask("allocate 32");
    with_live(&first, &session, 64 * MIB);
    with_live(&second, &session, 32 * MIB);
    let exporter = Exporter::start(&session);
    let text = exporter.metrics();
    let (one, other) = (labels_of(&text, first.pid()), labels_of(&text, second.pid()));
    assert!(one.is_some() && other.is_some() && one != other, "{text}");
    let live = |text: &str, labels: &Option<String>| {
        samples(text).get(&format!("gpupool_live_bytes{{{}}}", labels.as_deref().unwrap_or_default())).copied()
    };
    assert_eq!(live(&text, &one), Some((64 * MIB) as f64));
    // Killed, and not waited for: its page is still there.
    first.signal(libc::SIGKILL);
    let pid = first.pid();
    eventually("only the second one is told of", || labels_of(&exporter.metrics(), pid).is_none().then_some(()));
    let text = exporter.metrics();
    assert_eq!((live(&text, &one), live(&text, &other)), (None, Some((32 * MIB) as f64)));
    second.ask("free");
    with_live(&second, &session, 0);
    assert_eq!(live(&exporter.metrics(), &other), Some(0.0), "the number of now");
    second.end();
    assert_eq!(live(&exporter.metrics(), &other), None);
    for (request, status) in [
        ("GET /other HTTP/1.1\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
        ("nonsense\r\n\r\n", "400"),
        ("GET / HTTP/1.1\r\n\r\n", "200"),
    ] {
        assert!(exporter.answer(request).starts_with(&format!("HTTP/1.1 {status} ")), "{request}");
    }
    let head = exporter.answer("HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.ends_with("Connection: close\r\n\r\n") && !head.contains("Content-Length: 0"), "{head}");
}

#[test]
fn a_second_exporter_on_a_port_says_so_and_leaves_the_first_alone() {
    let session = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let first = Exporter::start(session.path());
    let second = gpupool(session.path(), &["export", "--listen", &first.address]).output();
    let second = second.unwrap_or_else(|e| panic!("{e}"));
    let stderr = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1));
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    let expected = format!("gpupool: export: cannot listen on {}: somebody listens there already", first.address);
    assert!(stderr.starts_with(&expected) && stderr.contains("--listen"), "{stderr}");
    assert!(first.metrics().contains("gpupool_exporter_info{"));
    let wrong = gpupool(session.path(), &["export", "--listen", "9402"]).output().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("expected an address and a port"), "{wrong:?}");
}

#[test]
fn who_asks_for_nothing_keeps_nobody_else_waiting() {
    let session = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let exporter = Exporter::start(session.path());
    let silent: Vec<_> = (0..8).map(|_| TcpStream::connect(&exporter.address)).collect();
    assert!(silent.iter().all(Result::is_ok));
    assert!(exporter.metrics().contains("gpupool_exporter_info{"));
}

#[test]
fn the_text_file_is_whole_readable_and_gone_with_its_exporter() {
    let mut program = agent().start(None);
    program.ask("init");
    program.ask("allocate 64");
    let session = program.session();
    with_live(&program, &session, 64 * MIB);
    let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let file = folder.path().join("gpupool.prom");
    let path = folder.path().display().to_string();
    let child = gpupool(&session, &["export", "--textfile", &path, "--interval", "100ms"]).spawn();
    let child = child.unwrap_or_else(|e| panic!("gpupool: {e}"));
    let read = || std::fs::read_to_string(&file).ok();
    let text = eventually("the file", read);
    assert!(text.ends_with('\n') && labels_of(&text, program.pid()).is_some(), "{text}");
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(&file).map(|data| data.permissions().mode() & 0o777);
    assert_eq!(mode.ok(), Some(0o644), "node_exporter is another user");
    let pid = program.pid();
    program.end();
    eventually("a file without it", || read().filter(|text| labels_of(text, pid).is_none()));
    assert!(stop(child, libc::SIGTERM).success());
    assert_eq!(std::fs::read_dir(folder.path()).map_or(0, Iterator::count), 0, "nothing stays that is old");
    assert_eq!(said(&session, &["export", "--textfile", &path, "--once"]), "");
    assert!(read().is_some_and(|text| text.contains("gpupool_exporter_info{")));
    let missing = gpupool(&session, &["export", "--textfile", "/nowhere", "--once"]).output();
    let missing = missing.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(missing.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("gpupool.prom in /nowhere cannot be written"));
}

/// `ps`, `top`, its details and `export` say the same of a program before, while and after it is suspended; what is counted grows by one each time.
#[test]
fn a_program_is_suspended_for_all_who_look_and_its_suspensions_and_images_are_counted() {
    let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let images = folder.path().join("images").display().to_string();
    let mut program = agent().env("GPUPOOL_HOST_LIMIT", "1GiB").start(None);
    program.ask("init");
    program.ask("allocate 64");
    let (session, pid) = (program.session(), program.pid().to_string());
    with_live(&program, &session, 64 * MIB);
    let look = |suspended: bool, [suspensions, resumes, images]: [f64; 3]| {
        let text = said(&session, &["export", "--once"]);
        let labels = labels_of(&text, program.pid()).unwrap_or_else(|| panic!("{text}"));
        let samples = samples(&text);
        let value = |name: &str| samples.get(&format!("gpupool_{name}{{{labels}}}")).copied();
        assert_eq!(value("process_suspended"), Some(f64::from(u8::from(suspended))), "{text}");
        let counted = ["suspensions_total", "resumes_total", "images_total"].map(value);
        assert_eq!(counted, [suspensions, resumes, images].map(Some), "{text}");
        let stopped = value("image_stop_seconds_total");
        assert!(stopped.is_some_and(|seconds| (seconds > 0.0) == (images > 0.0) && seconds < 60.0), "{text}");
        let word = if suspended { "suspended" } else { "running" };
        for arguments in [&["ps"][..], &["top", "--once", "--filter", &pid]] {
            let shown = gpupool(&session, arguments).env("COLUMNS", "200").output().unwrap_or_else(|e| panic!("{e}"));
            let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
            let row = shown.lines().find(|line| is_row_of(line, &pid)).unwrap_or_else(|| panic!("{shown}"));
            assert!(row.contains(&format!(" {word} ")), "{arguments:?}: {shown}");
        }
        value("process_suspended_timestamp_seconds")
    };
    assert_eq!(look(false, [0.0; 3]), None);
    let mut before = 0.0;
    for times in [1.0, 2.0] {
        said(&session, &["suspend", "--to", "host", &pid]);
        let since = look(true, [times, times - 1.0, times - 1.0]).unwrap_or_else(|| panic!("nobody says since when"));
        assert!(since > before, "{since}");
        before = since;
        said(&session, &["resume", &pid]);
        assert_eq!(look(false, [times, times, times - 1.0]), None);
        said(&session, &["checkpoint", &pid, &images]);
        // Its thread tells who asked, and another one writes the page.
        page("the image", &program, &session, |told| told.counter(Counter::Images) == times as u64);
        assert_eq!(look(false, [times; 3]), None);
    }
    program.end();
}

#[test]
fn top_once_shows_the_program_with_what_it_holds() {
    let mut program = agent().start(None);
    program.ask("init");
    program.ask("allocate 64");
    program.ask("allocate 700");
    let session = program.session();
    let told = with_live(&program, &session, 764 * MIB);
    let used: u64 = told.levels.places.rows.iter().map(|place| place.used).sum();
    let pid = program.pid().to_string();
    for columns in ["60", "80", "200"] {
        let output = gpupool(&session, &["top", "--once", "--filter", &pid]).env("COLUMNS", columns).output();
        let output = output.unwrap_or_else(|e| panic!("{e}"));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let row = text.lines().find(|line| is_row_of(line, &pid));
        let row = row.unwrap_or_else(|| panic!("{text}"));
        assert!(row.ends_with(" agent") && row.contains(&format!(" {:.1} MiB ", used as f64 / MIB as f64)), "{text}");
        assert!(text.lines().any(|line| line.starts_with("gpu0 ") && line.contains('█')), "{text}");
        assert!(!text.contains('\x1b'), "{text}");
    }
    program.end();
    assert!(!said(&session, &["top", "--once"]).lines().any(|line| is_row_of(line, &pid)), "it ended");
}

#[test]
fn rates_are_what_changed_between_two_looks() {
    let mut program = agent().start(None);
    program.ask("init");
    program.ask("allocate 64");
    let session = program.session();
    with_live(&program, &session, 64 * MIB);
    let pid = program.pid().to_string();
    let mut command = gpupool(&session, &["top", "--json", "--interval", "100ms", "--filter", &pid]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap_or_else(|e| panic!("gpupool: {e}"));
    let lines = BufReader::new(child.stdout.take().unwrap_or_else(|| panic!("no pipe to it"))).lines();
    let mut looks = lines.map_while(Result::ok).map(|line| {
        let json: serde_json::Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line}: {e}"));
        json["processes"].as_array().and_then(|rows| rows.iter().find(|row| row["process"]["name"] == "agent").cloned())
    });
    let mut next = || looks.next().flatten().unwrap_or_else(|| panic!("it is not listed any more"));
    assert!(next()["rates"].is_null(), "nothing to compare with");
    assert_eq!(next()["rates"]["allocated_bytes_per_second"], 0.0);
    program.ask("allocate 32");
    let mut bytes = 0.0;
    while bytes == 0.0 {
        bytes = next()["rates"]["allocated_bytes_per_second"].as_f64().unwrap_or_else(|| panic!("no number"));
    }
    // All of it between two looks a tenth of a second apart, or a little more on a busy machine.
    assert!(bytes > 0.0 && bytes <= (10 * 32 * MIB) as f64, "{bytes}");
    assert!(stop(child, libc::SIGTERM).code().is_none(), "it goes on until it is ended");
}

/// What a command says on stderr, which goes on all the same.
#[track_caller]
fn complaints(session: &Path, arguments: &[&str]) -> (String, String) {
    let output = gpupool(session, arguments).output().unwrap_or_else(|e| panic!("gpupool: {e}"));
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    (stdout, stderr)
}

#[test]
fn pages_that_cannot_be_read_are_named_once_and_the_others_are_told_of() {
    let mut program = agent().start(None);
    program.ask("init");
    program.ask("allocate 64");
    let session = program.session();
    with_live(&program, &session, 64 * MIB);
    let folder = session.join("gpupool");
    let own = std::fs::read_dir(&folder).into_iter().flatten().flatten().next().map(|entry| entry.path());
    let whole = own.and_then(|path| std::fs::read(path).ok()).unwrap_or_else(|| panic!("no page"));
    let pid = program.pid();
    // Newer; half written, by a count that is odd; cut; and of a process that is gone, which started before the first one did.
    for (started, change) in [(1, Some((8, 9))), (2, Some((1024, 1))), (3, None), (4, Some((32, 4)))] {
        let mut bytes = whole.clone();
        match change {
            Some((at, value)) => bytes[at] = value,
            None => bytes.truncate(5000),
        }
        if started == 4 {
            bytes[33..40].fill(0);
        }
        std::fs::write(folder.join(format!("{pid}-{started}.page")), bytes).unwrap_or_else(|e| panic!("{e}"));
    }
    // Whoever looks first removes the page that a process left, and nobody is told of that.
    for arguments in [&["ps"][..], &["export", "--once"], &["top", "--once"]] {
        let (stdout, stderr) = complaints(&session, arguments);
        let about: Vec<&str> = stderr.lines().filter(|line| line.contains(&format!("/{pid}-"))).collect();
        assert_eq!(about.len(), 3, "{arguments:?}: {stderr}");
        for word in ["has version 9", "half written", "shorter than"] {
            assert_eq!(about.iter().filter(|line| line.contains(word)).count(), 1, "{word}: {stderr}");
        }
        assert!(!folder.join(format!("{pid}-4.page")).exists(), "{arguments:?}");
        let is_of_it = |line: &&str| line.contains(&format!(",pid=\"{pid}\"")) || is_row_of(line, &pid.to_string());
        assert_eq!(stdout.lines().filter(is_of_it).count(), 1, "{stdout}");
    }
}

#[test]
fn a_program_with_a_hostile_name_is_one_process_with_a_name() {
    let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let path = folder.path().join("a\"} 1\nevil{b=\"\\\x1b[31m");
    harness::copy_program(&harness::program("agent"), &path);
    let mut program = Run::command(&path).sim("2x1GiB").shim().env("GPUPOOL_HOST_LIMIT", "0").start(None);
    program.ask("init");
    program.ask("allocate 64");
    let session = program.session();
    with_live(&program, &session, 64 * MIB);
    program.signal(libc::SIGSTOP);
    let shown = "a\"} 1\u{fffd}evil{b=\"\\\u{fffd}[31m";
    let exported = shown.replace('\\', "\\\\").replace('"', "\\\"");
    let stopped = format!(",process=\"{exported}\",slot=\"0\"}} 1");
    let text = eventually("a stopped process", || {
        let text = said(&session, &["export", "--once"]);
        let mut lines = text.lines().filter(|line| line.starts_with("gpupool_process_stopped{"));
        lines.any(|line| line.ends_with(&stopped)).then_some(text)
    });
    assert!(text.lines().all(|line| line.starts_with("gpupool_") || line.starts_with("# ")), "{text}");
    for arguments in [&["top", "--once"][..], &["ps"]] {
        let output = gpupool(&session, arguments).env("COLUMNS", "120").output().unwrap_or_else(|e| panic!("{e}"));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains(shown) && text.contains("stopped"), "{text:?}");
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
    }
    program.signal(libc::SIGCONT);
}
