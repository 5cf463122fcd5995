//! The rows of keys: none is told.

use http::Response;
use http_body_util::BodyExt;
use tower::ServiceExt;
use tower_quota::{
    judge::JudgeLayer,
    org::{Credential, Org, Orgs},
    outcome::Stamp,
    retry::RetryError,
};

use crate::{Body, Req, cl::json, post, stack};

const KEY: &str = "sk-abc";

/// What is told of such an answer, and its body, for the org whose key that is.
async fn told(answer: Response<Body>) -> (Option<String>, String) {
    let org = Org::new("a").credential(Credential::new(KEY));
    let client = tower::service_fn(move |_: Req| {
        let answer = answer.clone();
        async { Ok::<_, tower::BoxError>(answer) }
    });
    let answer = tower::Layer::layer(&JudgeLayer::new().scrub(&org), client).oneshot(post()).await.unwrap();
    let stamp = answer.extensions().get::<Stamp>().unwrap();
    assert!(!format!("{stamp:?}").contains(KEY));
    let said = stamp.said.as_deref().map(str::to_owned);
    (said, String::from_utf8(answer.into_body().into_bytes().unwrap().to_vec()).unwrap())
}

#[tokio::test]
async fn b142_a_key_that_a_provider_quotes_is_told_nowhere() {
    let body = |message: &str| format!(r#"{{"error":{{"message":"{message}","code":"invalid_api_key"}}}}"#);
    for (message, said) in [
        ("Incorrect API key provided: sk-abc", "Incorrect API key provided: ***"),
        ("Incorrect API key provided: sk-abc. You can find", "Incorrect API key provided: ***. You can find"),
        ("sk-abcsk-abc", "******"),
        // Escaped, as JSON may: here only what is told is looked at.
        ("sk\\u002dabc", "***"),
        // Masked by the provider, or another's.
        ("Incorrect API key provided: sk-a***c", "Incorrect API key provided: ***"),
        ("no sk-ant-api03-another", "no ***"),
        ("Bearer 0123456789abcdef", "Bearer ***"),
        // Its neighbours.
        ("a task-force", "a task-force"),
        ("sk_abc", "sk_abc"),
    ] {
        for status in [401, 400, 429, 500] {
            let (told, body) = told(json(status, body(message))).await;
            assert_eq!(told.as_deref(), Some(&*format!("invalid_api_key: {said}")), "{status} {message}");
            assert!(!body.contains(KEY), "{status} {body}");
        }
        // In a success that is none.
        let (told, body) = self::told(json(200, body(message))).await;
        assert_eq!(told.as_deref(), Some(&*format!("invalid_api_key: {said}")), "{message}");
        assert!(!body.contains(KEY), "{body}");
    }
    // What a model writes is its own, and unchanged.
    let good = r#"{"choices":[{"message":{"content":"sk-abc"}}]}"#;
    assert_eq!(told(json(200, good)).await, (None, good.to_owned()));
    // Nor does a text that is no JSON bring it out.
    let mut text = json(502, "no route for sk-abc");
    text.headers_mut().insert("content-type", "text/plain".parse().unwrap());
    assert_eq!(told(text).await, (Some("502 Bad Gateway: no route for ***".to_owned()), "no route for ***".to_owned()));
}

/// In whatever form, and whatever stands around it.
#[tokio::test]
async fn b142_a_key_is_found_however_it_is_written() {
    // No form that any key has: nothing but the key itself is known of it. Its marks are what is encoded.
    let key = "aB3+dE/6h=~8.k-2";
    let written = [
        key,
        "aB3%2BdE%2F6h%3D%7E8.k-2",
        "aB3%2bdE%2f6h%3d~8.k-2",
        "aB3%2BdE/6h=~8.k-2",
        "%61%42%33%2B%64%45%2F%36%68%3D%7E%38%2E%6B%2D%32",
        r"aB3\u002bdE\/6h\u003d~8.k-2",
    ];
    let around = [
        ("", ""),
        ("Bearer ", ""),
        ("Authorization: Bearer ", ", no"),
        ("https://u:", "@host/v1"),
        ("/v1?key=", "&a=b"),
        ("'", "'"),
        ("x", "x"),
        ("%20", "%0A"),
    ];
    let org = Org::new("a").credential(Credential::new(key));
    for written in written {
        for (before, after) in around {
            let text = format!("no {before}{written}{after} here");
            let client = tower::service_fn(|_: Req| {
                let body = format!(r#"{{"error":{{"type":"invalid_request_error","message":"{text}"}}}}"#);
                async { Ok::<_, tower::BoxError>(json(400, body)) }
            });
            let answer = tower::Layer::layer(&JudgeLayer::new().scrub(&org), client).oneshot(post()).await.unwrap();
            let said = answer.extensions().get::<Stamp>().unwrap().said.clone().unwrap();
            let body = answer.into_body().into_bytes().unwrap();
            let clean = format!("no {before}***{after} here");
            assert!(std::str::from_utf8(&body).unwrap().contains(&clean), "{text}: {body:?}");
            // What follows the word may be taken for a key, and then its neighbour goes too.
            assert!(said.contains("***") && !said.contains("8.k-2"), "{text}: {said}");
        }
    }
}

/// A gateway before both may quote either.
#[tokio::test(start_paused = true)]
async fn b142_a_siblings_key_is_told_nowhere_either() {
    let (of_a, of_b, of_c) = ("key-of-a+1", "key-of-b+1", "key-of-c+1");
    let org = |name: &str, key: &str| Org::new(name).credential(Credential::new(key));
    for quoted in [of_a, of_b, of_c, "key-of-b%2B1", "key-of-c%2b1", "Bearer key-of-b+1"] {
        for status in [400, 401, 500] {
            let orgs = Orgs::new([org("a", of_a), org("b", of_b)]).unwrap();
            let text = format!(r#"{{"error":{{"message":"no {quoted} here"}}}}"#);
            let (service, _) =
                stack(&orgs, |stack| stack, move |_, _| std::future::ready(Ok(json(status, text.clone()))));
            // One that joins later is known from then on.
            service.members().add(org("c", of_c)).unwrap();
            let shown = match service.oneshot(post()).await {
                Ok(answer) => {
                    let stamp = format!("{:?}", answer.extensions().get::<Stamp>().unwrap());
                    let body = answer.into_body().collect().await.unwrap().to_bytes();
                    stamp + std::str::from_utf8(&body).unwrap()
                }
                Err(RetryError::Exhausted(error)) => format!("{error:?} {:?} {:?}", error.first, error.last),
                Err(error) => format!("{error} {error:?}"),
            };
            assert!(!shown.contains("key-of-"), "{quoted} {status}: {shown}");
            assert_eq!(shown.contains("***"), status != 401, "{quoted} {status}: {shown}");
        }
    }
}
