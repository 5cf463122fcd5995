//! The rows of keys: none is told.

use http::Response;
use tower::ServiceExt;
use tower_quota::{
    judge::JudgeLayer,
    org::{Credential, Org},
    outcome::Stamp,
};

use crate::{Body, Req, cl::json, post};

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
